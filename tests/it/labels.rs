//! The node's labels against an API server that answers each apply as the test says: what is asked of it, when, and what is
//! told of a conflict.

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use http::{Method, Request, Response};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tranche::cluster::events::EventSubject;
use tranche::cluster::{KubeCluster, LABEL_MANAGER, NodeCluster};
use tranche::inventory::Inventory;
use tranche::inventory::labels::{COUNT, MEMORY, PRESENT, PRODUCT};
use tranche::model::gpu::{Gpu, Health, Memory, MigMode, NodeGpus, Pci};
use tranche::model::quantity::Bytes;
use tranche::node::config::NodeLabels;
use tranche::node::labels::LabelKeeper;

use crate::mock_api::PATIENCE;

/// A write: its method, its path with the query, and its body.
type Write = (Method, String, Value);

/// An API server that takes writes, and refuses the first ones with these statuses and messages.
fn server(refusals: &[(u16, &'static str)]) -> (Arc<NodeCluster>, mpsc::UnboundedReceiver<Write>) {
    let (sender, writes) = mpsc::unbounded_channel();
    let left = Arc::new(Mutex::new(refusals.iter().copied().collect::<VecDeque<_>>()));
    let service = tower::service_fn(move |request: Request<Body>| {
        let (sender, left) = (sender.clone(), left.clone());
        async move {
            let (head, body) = request.into_parts();
            let body: Value = serde_json::from_slice(&body.collect_bytes().await.unwrap()).unwrap();
            let refused = (head.method == Method::PATCH).then(|| left.lock().unwrap().pop_front()).flatten();
            let (code, answer) = match refused {
                Some((code, message)) => {
                    (code, json!({"kind": "Status", "status": "Failure", "code": code, "message": message}))
                }
                None => (200, body.clone()),
            };
            let _ = sender.send((head.method, head.uri.to_string(), body));
            let answer = Response::builder().status(code).body(Body::from(answer.to_string().into_bytes()));
            Ok::<_, Infallible>(answer.unwrap())
        }
    });
    let cluster = KubeCluster::with_client(Client::new(service, "default"));
    (Arc::new(NodeCluster::new(cluster, "node-a".into())), writes)
}

async fn next(writes: &mut mpsc::UnboundedReceiver<Write>) -> Write {
    timeout(PATIENCE, writes.recv()).await.expect("a write in time").expect("the server is there")
}

fn found(count: u32) -> Inventory {
    let gpu = |minor| Gpu {
        uuid: format!("GPU-{minor}").as_str().into(),
        minor,
        product_name: "NVIDIA H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        compute_capability: (9, 0),
        memory: Memory::Known { total: Bytes::from_mib(81_559), reserved: Bytes(0) },
        multiprocessors: Some(132),
        addressing_mode: None,
        pci: Pci::default(),
        mig: MigMode::Off,
        health: Health::Healthy,
    };
    Inventory::Found(NodeGpus { gpus: (0..count).map(gpu).collect(), ..NodeGpus::default() })
}

/// What the labels of an apply are; it has to be one, without force.
fn applied((method, uri, body): &Write) -> BTreeMap<String, String> {
    assert_eq!(*method, Method::PATCH);
    let (path, query) = uri.split_once('?').expect("an apply has a query");
    assert_eq!(path, "/api/v1/nodes/node-a");
    assert!(query.contains(&format!("fieldManager={LABEL_MANAGER}")), "{query}");
    assert!(!query.contains("force"), "others' labels are left alone: {query}");
    assert_eq!(body["metadata"].as_object().unwrap().len(), 2, "name and labels, nothing else: {body}");
    serde_json::from_value(body["metadata"]["labels"].clone()).unwrap()
}

#[tokio::test]
async fn a_node_is_labelled_with_what_it_has_and_again_when_that_changes() {
    let (api, mut writes) = server(&[]);
    let (inventory, known) = watch::channel(Inventory::Unknown);
    let stop = CancellationToken::new();
    let keeper = tokio::spawn(LabelKeeper::new(api, NodeLabels::On, known).run(stop.clone()));
    inventory.send_replace(found(8));
    let expected = [(COUNT, "8"), (MEMORY, "81559"), (PRESENT, "true"), (PRODUCT, "NVIDIA-H100-80GB-HBM3")];
    let expected: BTreeMap<_, _> =
        expected.into_iter().map(|(key, value)| (key.to_owned(), value.to_owned())).collect();
    assert_eq!(applied(&next(&mut writes).await), expected, "and nothing while nothing was known");
    inventory.send_replace(found(7));
    assert_eq!(applied(&next(&mut writes).await)[COUNT], "7");
    // While the driver is replaced the labels stay: whoever selects by them is not to be driven off.
    inventory.send_replace(Inventory::Unavailable { reason: "no driver".to_owned() });
    inventory.send_replace(found(0));
    assert_eq!(applied(&next(&mut writes).await), BTreeMap::new(), "without GPUs no labels");
    assert!(writes.try_recv().is_err(), "nothing was written for the driver's absence");
    stop.cancel();
    timeout(PATIENCE, keeper).await.expect("it ends").unwrap().unwrap();
    assert!(writes.try_recv().is_err(), "the labels stay when the process ends");
}

#[tokio::test]
async fn labels_of_somebody_else_are_left_alone_and_that_is_told_once() {
    let conflict =
        (409, "Apply failed with 1 conflict: conflict with \"gfd\": .metadata.labels.nvidia.com/gpu.product");
    let (api, mut writes) = server(&[conflict; 5]);
    let (_inventory, known) = watch::channel(found(1));
    let stop = CancellationToken::new();
    let (events, posting) = api.events();
    let posting = tokio::spawn(posting);
    let pod = EventSubject::Pod {
        namespace: "tranche-system".into(),
        name: "tranche-node-x".into(),
        uid: "u".into(),
    };
    let mut registry = tranche::ops::metrics::registry();
    let keeper = LabelKeeper::new(api, NodeLabels::On, known).telling(pod, events).counting(&mut registry);
    let keeper = tokio::spawn(keeper.with_pace(Duration::from_millis(20)).run(stop.clone()));
    let (mut applies, mut told) = (0, Vec::new());
    // Five are refused, and the sixth is not.
    while applies < 6 || told.is_empty() {
        match next(&mut writes).await {
            write @ (Method::PATCH, ..) => {
                applied(&write);
                applies += 1;
            }
            (_, uri, event) => {
                assert_eq!(uri.split('?').next(), Some("/api/v1/namespaces/tranche-system/events"));
                told.push(event);
            }
        }
    }
    stop.cancel();
    timeout(PATIENCE, keeper).await.expect("it ends").unwrap().unwrap();
    // The keeper is gone, and with it the last sender of events: what was told is written by now.
    timeout(PATIENCE, posting).await.expect("it ends").unwrap();
    while let Ok((method, _, event)) = writes.try_recv() {
        told.extend((method == Method::POST).then_some(event));
    }
    assert_eq!(told.len(), 1, "{told:#?}");
    assert_eq!(told[0]["reason"], "NodeLabelsConflict");
    let message = told[0]["message"].as_str().unwrap();
    assert!(message.contains("left alone") && message.contains("conflict with \"gfd\""), "{message}");
    let counted = tranche::ops::metrics::plain_text(&registry).unwrap();
    assert!(counted.contains("tranche_node_label_conflicts_total 5\n"), "{counted}");
}

#[tokio::test]
async fn what_was_set_is_removed_where_that_is_asked_for() {
    let (api, mut writes) = server(&[(503, "not now")]);
    let (_inventory, known) = watch::channel(Inventory::Unknown);
    let stop = CancellationToken::new();
    let keeper = LabelKeeper::new(api, NodeLabels::Remove, known).with_pace(Duration::from_millis(20));
    let keeper = tokio::spawn(keeper.run(stop.clone()));
    for _ in 0..2 {
        assert_eq!(applied(&next(&mut writes).await), BTreeMap::new(), "whatever GPUs there are");
    }
    stop.cancel();
    timeout(PATIENCE, keeper).await.expect("it ends").unwrap().unwrap();
}
