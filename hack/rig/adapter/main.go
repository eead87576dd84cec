// The custom metrics API of a rig: answers HorizontalPodAutoscalers from Prometheus, by rules that are written as
// prometheus-adapter's are. Of those it knows what deploy/examples uses: seriesQuery, resources.overrides of
// namespace and pod, name.as and metricsQuery. It asks one Prometheus and the API server, and writes nothing but its
// own certificate.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"strconv"
	"strings"
	"text/template"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/klog/v2"
	"k8s.io/metrics/pkg/apis/custom_metrics"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/cmd"
	"sigs.k8s.io/custom-metrics-apiserver/pkg/provider"
	"sigs.k8s.io/yaml"
)

// What one answer of Prometheus may have at most, in bytes.
const mostRead = 8 << 20

var pods = schema.GroupVersionResource{Version: "v1", Resource: "pods"}

// A rule, as prometheus-adapter's configuration has it. Fields that are not here end the program.
type rule struct {
	SeriesQuery string `json:"seriesQuery"`
	Resources   struct {
		Overrides map[string]struct {
			Resource string `json:"resource"`
		} `json:"overrides"`
	} `json:"resources"`
	Name struct {
		As string `json:"as"`
	} `json:"name"`
	MetricsQuery string `json:"metricsQuery"`
}

// What a metricsQuery may name.
type words struct{ Series, LabelMatchers, GroupBy string }

type metric struct {
	series, namespaceLabel, podLabel string
	query                            *template.Template
}

func (r rule) metric() (metric, error) {
	m := metric{series: strings.SplitN(r.SeriesQuery, "{", 2)[0]}
	for label, over := range r.Resources.Overrides {
		switch over.Resource {
		case "namespace":
			m.namespaceLabel = label
		case "pod":
			m.podLabel = label
		default:
			return m, fmt.Errorf("resource %q is not known here", over.Resource)
		}
	}
	if m.series == "" || m.namespaceLabel == "" || m.podLabel == "" || r.Name.As == "" {
		return m, fmt.Errorf("rule %q needs seriesQuery, overrides of namespace and pod, and name.as", r.Name.As)
	}
	query, err := template.New(r.Name.As).Delims("<<", ">>").Parse(r.MetricsQuery)
	m.query = query
	return m, err
}

func read(path string) (map[string]metric, error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var file struct {
		Rules []rule `json:"rules"`
	}
	if err := yaml.UnmarshalStrict(text, &file); err != nil {
		return nil, err
	}
	all := map[string]metric{}
	for _, r := range file.Rules {
		if all[r.Name.As], err = r.metric(); err != nil {
			return nil, err
		}
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("%s has no rules", path)
	}
	return all, nil
}

type fromPrometheus struct {
	metrics map[string]metric
	address string
	client  dynamic.Interface
	http    http.Client
}

// values asks for these pods of a namespace; by pod.
func (p *fromPrometheus) values(ctx context.Context, m metric, namespace string, names []string) (map[string]float64, error) {
	matchers := fmt.Sprintf("%s=%q,%s=~%q", m.namespaceLabel, namespace, m.podLabel, strings.Join(names, "|"))
	var query strings.Builder
	if err := m.query.Execute(&query, words{m.series, matchers, m.podLabel}); err != nil {
		return nil, err
	}
	asked, err := http.NewRequestWithContext(ctx, http.MethodGet,
		p.address+"/api/v1/query?query="+url.QueryEscape(query.String()), nil)
	if err != nil {
		return nil, err
	}
	answer, err := p.http.Do(asked)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	var said struct {
		Status, Error string
		Data          struct {
			Result []struct {
				Metric map[string]string
				Value  [2]any
			}
		}
	}
	if err := json.NewDecoder(io.LimitReader(answer.Body, mostRead)).Decode(&said); err != nil {
		return nil, err
	}
	if said.Status != "success" {
		return nil, fmt.Errorf("Prometheus says of %s: %s", query.String(), said.Error)
	}
	found := map[string]float64{}
	for _, row := range said.Data.Result {
		text, _ := row.Value[1].(string)
		value, err := strconv.ParseFloat(text, 64)
		if err != nil || value != value {
			continue
		}
		found[row.Metric[m.podLabel]] = value
	}
	klog.Infof("%s: %v", query.String(), found)
	return found, nil
}

func (p *fromPrometheus) known(info provider.CustomMetricInfo) (metric, error) {
	m, there := p.metrics[info.Metric]
	if !there || !info.Namespaced || info.GroupResource.Resource != "pods" {
		return m, provider.NewMetricNotFoundError(info.GroupResource, info.Metric)
	}
	return m, nil
}

func told(namespace, name string, info provider.CustomMetricInfo, value float64) custom_metrics.MetricValue {
	return custom_metrics.MetricValue{
		DescribedObject: custom_metrics.ObjectReference{APIVersion: "/v1", Kind: "Pod", Name: name, Namespace: namespace},
		Metric:          custom_metrics.MetricIdentifier{Name: info.Metric},
		Timestamp:       metav1.Now(),
		Value:           *resource.NewMilliQuantity(int64(value*1000), resource.DecimalSI),
	}
}

func (p *fromPrometheus) GetMetricByName(ctx context.Context, name types.NamespacedName, info provider.CustomMetricInfo, _ labels.Selector) (*custom_metrics.MetricValue, error) {
	m, err := p.known(info)
	if err != nil {
		return nil, err
	}
	values, err := p.values(ctx, m, name.Namespace, []string{name.Name})
	if err != nil {
		return nil, err
	}
	value, there := values[name.Name]
	if !there {
		return nil, provider.NewMetricNotFoundForError(info.GroupResource, info.Metric, name.Name)
	}
	one := told(name.Namespace, name.Name, info, value)
	return &one, nil
}

func (p *fromPrometheus) GetMetricBySelector(ctx context.Context, namespace string, selector labels.Selector, info provider.CustomMetricInfo, _ labels.Selector) (*custom_metrics.MetricValueList, error) {
	m, err := p.known(info)
	if err != nil {
		return nil, err
	}
	found, err := p.client.Resource(pods).Namespace(namespace).List(ctx, metav1.ListOptions{LabelSelector: selector.String()})
	if err != nil {
		return nil, err
	}
	names := []string{}
	for _, pod := range found.Items {
		names = append(names, pod.GetName())
	}
	list := &custom_metrics.MetricValueList{}
	if len(names) == 0 {
		return list, nil
	}
	values, err := p.values(ctx, m, namespace, names)
	if err != nil {
		return nil, err
	}
	for _, name := range names {
		if value, there := values[name]; there {
			list.Items = append(list.Items, told(namespace, name, info, value))
		}
	}
	return list, nil
}

func (p *fromPrometheus) ListAllMetrics() []provider.CustomMetricInfo {
	all := []provider.CustomMetricInfo{}
	for name := range p.metrics {
		all = append(all, provider.CustomMetricInfo{GroupResource: pods.GroupResource(), Namespaced: true, Metric: name})
	}
	return all
}

func main() {
	adapter := &cmd.AdapterBase{Name: "rig-adapter"}
	var config, address string
	adapter.Flags().StringVar(&config, "config", "", "the rules, a file in the form of prometheus-adapter's")
	adapter.Flags().StringVar(&address, "prometheus-url", "", "where Prometheus answers")
	if err := adapter.Flags().Parse(os.Args); err != nil {
		klog.Fatal(err)
	}
	metrics, err := read(config)
	if err != nil {
		klog.Fatalf("%s: %v", config, err)
	}
	client, err := adapter.DynamicClient()
	if err != nil {
		klog.Fatal(err)
	}
	adapter.WithCustomMetrics(&fromPrometheus{metrics, strings.TrimRight(address, "/"), client, http.Client{Timeout: 10 * time.Second}})
	if err := adapter.Run(context.Background()); err != nil {
		klog.Fatal(err)
	}
}
