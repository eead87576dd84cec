//! The paper's results, to stand beside ours: means of ten seeds, percent of GPUs allocated, computed from the
//! results that its authors published with their simulator (hkust-adsl/kubernetes-scheduler-simulator,
//! `analysis_allo_discrete.csv`).

pub const SOURCE: &str = "Weng et al., \"Beware of Fragmentation\", USENIX ATC 2023: results published with its \
                          artifact, mean of 10 seeds";

pub const POLICIES: [&str; 6] = ["Random", "Dot product", "GPU clustering", "GPU packing", "Best fit", "FGD"];

/// Set, load in percent, results in the order of [`POLICIES`].
const RESULTS: &[(&str, u32, [f64; 6])] = &[
    ("openb_pod_list_default", 90, [85.02, 89.98, 89.98, 89.98, 89.99, 89.98]),
    ("openb_pod_list_default", 100, [86.30, 90.62, 91.65, 91.78, 92.86, 95.23]),
    ("openb_pod_list_default", 130, [87.47, 90.85, 91.88, 92.00, 93.08, 95.39]),
    ("openb_pod_list_gpushare60", 130, [83.65, 87.11, 87.20, 87.45, 89.36, 91.40]),
    ("openb_pod_list_gpushare100", 130, [79.44, 82.42, 82.65, 82.57, 85.01, 86.90]),
    ("openb_pod_list_multigpu50", 100, [81.28, 94.73, 95.69, 96.06, 95.62, 97.09]),
    ("openb_pod_list_cpu250", 130, [80.42, 83.81, 87.99, 88.28, 91.45, 93.41]),
    ("openb_pod_list_gpuspec33", 130, [86.46, 89.14, 92.12, 93.22, 93.09, 94.55]),
];

/// The loads at which there are results of a set, with them.
pub fn results(set: &str) -> impl Iterator<Item = (u32, [f64; 6])> {
    RESULTS.iter().filter(move |(name, ..)| *name == set).map(|(_, load, results)| (*load, *results))
}

/// The best of all policies at a load; none: there is no result of this set and load.
pub fn best(set: &str, percent: usize) -> Option<f64> {
    let (_, results) = results(set).find(|(load, _)| *load as usize == percent)?;
    results.into_iter().reduce(f64::max)
}
