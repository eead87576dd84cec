use std::env;
use std::path::Path;

use super::*;
use crate::allocate::Policy;

/// Two nodes with much CPU, one with little; pods whose shares leave holes.
const NODES: &str = "sn,cpu_milli,memory_mib,gpu,model\n\
                     big-1,64000,262144,4,B\nbig-2,64000,262144,4,B\nsmall,6000,32768,2,S\n";
const PODS: &str = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\n\
                    whole,8000,8192,1,1000,\npair,16000,8192,2,1000,\nhalf,2000,4096,1,500,\n\
                    most,2000,4096,1,700,\nrest,2000,4096,1,300,\ncpu,4000,4096,0,0,\nlittle,1000,1024,1,200,S|B\n";

fn trace() -> Trace {
    Trace { nodes: trace::nodes("nodes", NODES).unwrap(), pods: trace::pods("pods", PODS).unwrap() }
}

fn series(scheduler: Scheduler, seeds: u32) -> Series {
    let runs = (0..seeds).map(|seed| replay::run(&trace(), scheduler, 1.3, seed)).collect();
    Series { scheduler, runs }
}

#[test]
fn a_run_is_the_same_each_time_and_allocates_no_more_than_there_is() {
    for scheduler in Scheduler::all() {
        let (first, again) = (series(scheduler, 3), series(scheduler, 3));
        for (one, other) in first.runs.iter().zip(&again.runs) {
            assert_eq!(one.allocated, other.allocated, "{scheduler}");
        }
        let end = first.end();
        assert!(end.min > 50.0 && end.max <= 100.0, "{scheduler}: {end:?}");
        let at_half = first.at(50).unwrap().mean;
        assert!(at_half <= 50.0 && at_half > 30.0, "{scheduler}: {at_half}");
        assert!(first.at(131).is_none(), "{scheduler}");
    }
}

#[test]
fn the_report_has_a_row_an_object_and_a_curve_per_policy() {
    let all = Scheduler::all().into_iter().map(|scheduler| series(scheduler, 2)).collect();
    let report = Report { pods: "openb_pod_list_default".to_owned(), load: 1.3, all };
    let text = report.text();
    for word in ["pack", "spread", "fragmentation", "kube-default", "AT 100 %", "FGD", "95.39", "ATC 2023"] {
        assert!(text.contains(word), "{word} is missing:\n{text}");
    }
    let objects: Vec<serde_json::Value> =
        report.json_lines().lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(objects.len(), 4);
    assert_eq!((&objects[0]["policy"], &objects[0]["seeds"]), (&"pack".into(), &2.into()));
    let percent = |key: &str| objects[0][key].as_f64().unwrap();
    assert_eq!((percent("paper_best_percent"), percent("paper_best_percent_at_100")), (95.39, 95.23));
    assert!(percent("allocated_percent_at_90") <= percent("allocated_percent_at_100"));
    assert!(percent("allocated_percent_min") <= percent("allocated_percent"));
    assert!(percent("allocated_percent") <= percent("allocated_percent_max"));
    assert!(report.csv().lines().any(|line| line.starts_with("kube-default,130,")), "{}", report.csv());
    assert_eq!(plot::svg(&report).matches("<polyline").count(), 4);
    let ours = Report { pods: "my-own-pods".to_owned(), ..report };
    assert!(!ours.text().contains("PAPER"), "no figures that are not the set's");
    assert!(
        ours.json_lines().lines().all(|line| line.contains(r#""paper_best_percent":null"#)),
        "{}",
        ours.json_lines()
    );
}

#[test]
fn a_bad_file_is_refused_with_line_and_field() {
    let pod = |line: &str| trace::pods("p.csv", &format!("{PODS}{line}\n")).unwrap_err().to_string();
    for (line, words) in [
        ("x,1,1,1,1001,", "p.csv, line 9, field gpu_milli: 1001 is more than the 1000 thousandths"),
        ("x,1,1,1,0,", "line 9, field gpu_milli: 0 thousandths of 1 GPUs"),
        ("x,1,1,0,5,", "line 9, field gpu_milli: 5 thousandths of no GPU"),
        ("x,many,1,1,5,", "line 9, field cpu_milli: \"many\" is not a valid whole number"),
        ("x,1,-1,1,5,", "line 9, field memory_mib: \"-1\" is not a valid whole number"),
        ("x,1,1,65,1000,", "line 9, field num_gpu: 65 GPUs"),
        (",1,1,1,5,", "line 9, field name: is empty"),
        ("x,1,1,1,5", "line 9: 5 fields where the first line names 6"),
    ] {
        assert!(pod(line).contains(words), "{}", pod(line));
    }
    let node = |text: &str| trace::nodes("n.csv", text).unwrap_err().to_string();
    assert_eq!(node(""), "n.csv is empty; its first line names the columns");
    assert!(node("sn,gpu\na,1\n").contains("n.csv, line 1: column cpu_milli is missing; there are: sn, gpu"));
    assert!(
        node(&format!("{NODES}big-1,1,1,1,X\n")).contains("line 5, field sn: node big-1 is in an earlier")
    );
    assert!("best".parse::<Scheduler>().unwrap_err().contains("pack, spread, fragmentation, kube-default"));
}

/// The figures that the project aims at, on each set of the public trace that is there, at the greatest load of which the
/// paper tells. One run: the means of ten are what `make bench` compares.
#[test]
#[ignore = "needs the public trace"]
fn the_public_trace_is_packed_as_well_as_the_paper_packs_it() {
    let data = env::var_os("TRANCHE_DATA").expect("TRANCHE_DATA names a folder with openb/");
    let read = |name: &str| fs::read_to_string(Path::new(&data).join("openb").join(name)).unwrap();
    let nodes = trace::nodes("nodes", &read("openb_node_list_gpu_node.csv")).unwrap();
    let files = fs::read_dir(Path::new(&data).join("openb")).unwrap().map(|file| file.unwrap().file_name());
    let mut sets: Vec<String> =
        files.filter_map(|file| Some(file.to_str()?.strip_suffix(".csv")?.to_owned())).collect();
    sets.sort();
    let mut seen = 0;
    for set in sets {
        let Some((load, results)) = paper::results(&set).last() else { continue };
        let pods = trace::pods("pods", &read(&format!("{set}.csv"))).unwrap();
        let trace = Trace { nodes: nodes.clone(), pods };
        let end = |scheduler| replay::run(&trace, scheduler, f64::from(load) / 100.0, 0).last();
        let (ours, kube) = (end(Scheduler::Ours(Policy::Fragmentation)), end(Scheduler::Kube));
        let best = results.into_iter().fold(0.0, f64::max);
        println!("{set} at {load} %: {ours:.2}, the paper's best {best}, kube-scheduler's default {kube:.2}");
        assert!(ours >= best && ours > kube, "{set} at {load} %: {ours}, {best} and {kube}");
        seen += 1;
    }
    assert!(seen > 0, "{} has no set of which the paper tells", Path::new(&data).display());
}
