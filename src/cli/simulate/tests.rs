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

/// As NVML tells it of a H100 with 80 GiB, and of a card of our own that can be halved.
const PROFILES: &str = "model,profile,compute_slices,memory_mib,memory_slices,fit,starts\n\
                        H,1g.10gb,1,9984,1,7,0|1|2|3|4|5|6\nH,1g.20gb,1,20096,2,4,0|2|4|6\n\
                        H,2g.20gb,2,20096,2,3,0|2|4\nH,3g.40gb,3,40448,4,2,0|4\n\
                        H,4g.40gb,4,40448,4,1,0\nH,7g.80gb,7,81152,8,1,0\n\
                        half,1g.1gb,1,1000,1,2,0|1\n";

fn profiles() -> Profiles {
    Profiles::read("m.csv", PROFILES).unwrap()
}

/// What each scheduler allocates at last, in percent of all GPUs.
fn ends(nodes: &str, pods: &str, load: f64) -> Vec<(Scheduler, f64)> {
    let trace = Trace {
        nodes: trace::nodes("nodes", nodes, &profiles()).unwrap(),
        pods: trace::pods("pods", pods).unwrap(),
    };
    Scheduler::all().into_iter().map(|one| (one, replay::run(&trace, one, load, 0).last())).collect()
}

fn trace() -> Trace {
    Trace {
        nodes: trace::nodes("nodes", NODES, &Profiles::default()).unwrap(),
        pods: trace::pods("pods", PODS).unwrap(),
    }
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
    let report = SimulationReport { pods: "openb_pod_list_default".to_owned(), load: 1.3, all };
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
    let ours = SimulationReport { pods: "my-own-pods".to_owned(), ..report };
    assert!(!ours.text().contains("PAPER"), "no figures that are not the set's");
    assert!(
        ours.json_lines().lines().all(|line| line.contains(r#""paper_best_percent":null"#)),
        "{}",
        ours.json_lines()
    );
}

#[test]
fn mig_devices_are_cut_off_the_gpus_that_are_to_be_cut_and_shares_go_to_the_others() {
    let (node, pod) = (
        "sn,cpu_milli,memory_mib,gpu,model,mig_gpus\n",
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,isolation\n",
    );
    // Seven of one slice fit on a GPU of eight memory slices; the eighth waits.
    let (one, small) = (format!("{node}a,64000,262144,1,H,1\n"), format!("{pod}s,1000,1024,1,125,mig\n"));
    // What is less than a slice gets one, and counts as what was asked.
    let less = format!("{pod}s,1000,1024,1,100,mig\n");
    // Of two GPUs one is cut, and the other is for shares.
    let (two, both) = (
        format!("{node}a,64000,262144,2,H,1\n"),
        format!("{pod}s,1000,1024,1,1000,\nm,1000,1024,1,500,mig\n"),
    );
    // None is cut, or none is left for shares.
    let (none, share) = (format!("{node}a,64000,262144,1,H,0\n"), format!("{pod}s,1000,1024,1,500,\n"));
    for (nodes, pods, load, percent) in [
        (&one, &small, 1.3, 87.5),
        (&one, &less, 1.0, 70.0),
        (&two, &both, 2.0, 100.0),
        (&none, &small, 1.0, 0.0),
        (&one, &share, 1.0, 0.0),
    ] {
        for (scheduler, end) in ends(nodes, pods, load) {
            assert!((end - percent).abs() < 1e-9, "{scheduler}: {end} of {nodes}{pods}");
        }
    }
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
    let node = |text: &str| trace::nodes("n.csv", text, &profiles()).unwrap_err().to_string();
    assert_eq!(node(""), "n.csv is empty; its first line names the columns");
    assert!(node("sn,gpu\na,1\n").contains("n.csv, line 1: column cpu_milli is missing; there are: sn, gpu"));
    assert!(
        node(&format!("{NODES}big-1,1,1,1,X\n")).contains("line 5, field sn: node big-1 is in an earlier")
    );
    let cut = |line: &str| node(&format!("sn,cpu_milli,memory_mib,gpu,model,mig_gpus\n{line}\n"));
    for (line, words) in [
        ("a,1,1,2,H,3", "n.csv, line 2, field mig_gpus: 3 is more than the 2 GPUs of the node"),
        ("a,1,1,2,T4,1", "field mig_gpus: --mig-profiles does not say what a GPU of model \"T4\" can be cut"),
        ("a,1,1,2,H,all", "field mig_gpus: \"all\" is not a valid whole number"),
    ] {
        assert!(cut(line).contains(words), "{}", cut(line));
    }
    let isolated = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,isolation\nx,1,1,1,500,mps\n";
    let words = trace::pods("p.csv", isolated).unwrap_err().to_string();
    assert!(words.contains("p.csv, line 2, field isolation: \"mps\" is not valid: write mig"), "{words}");
    let profile =
        |line: &str| Profiles::read("m.csv", &format!("{PROFILES}{line}\n")).unwrap_err().to_string();
    for (line, words) in [
        ("H,1g.10gb,1,1,1,1,0", "m.csv, line 9, field profile: 1g.10gb is in an earlier line of this model"),
        ("H,x,0,1,1,1,0", "field compute_slices: 0 is not valid: write 1 or more"),
        ("H,x,1,1,1,1,0|", "field starts: \"\" is not a memory slice at which it may begin"),
        ("H,x,1,1,4,1,127", "field starts: \"127\" is not a memory slice at which it may begin"),
        (",x,1,1,1,1,0", "field model: is empty"),
    ] {
        assert!(profile(line).contains(words), "{}", profile(line));
    }
    assert!("best".parse::<Scheduler>().unwrap_err().contains("pack, spread, fragmentation, kube-default"));
}

/// The figures that the project aims at, on each set of the public trace that is there, at the greatest load of which the
/// paper tells. One run: the means of ten are what `make bench` compares.
#[test]
#[ignore = "needs the public trace"]
fn the_public_trace_is_packed_as_well_as_the_paper_packs_it() {
    let data = env::var_os("TRANCHE_DATA").expect("TRANCHE_DATA names a folder with openb/");
    let read = |name: &str| fs::read_to_string(Path::new(&data).join("openb").join(name)).unwrap();
    let nodes = trace::nodes("nodes", &read("openb_node_list_gpu_node.csv"), &Profiles::default()).unwrap();
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
