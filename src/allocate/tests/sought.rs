//! `pack` leaves GPUs that some pods cannot do without to them, as long as others will do.

use super::*;

const A100: &str = "device.attributes['gpu.nvidia.com'].productName == 'A100'";

/// Two nodes, each with two GPUs of its own product.
fn two_products(h100_mib: u64, a100_mib: u64) -> Index {
    let of = |name: &str, mib, product: &'static str| {
        let spec = node(name, 2, mib);
        tell(spec, &[[("productName", product)].as_slice(); 2])
    };
    let mut a100 = of("a100", a100_mib, "A100");
    a100.gpus.iter_mut().for_each(|gpu| gpu.product = "NVIDIA A100".to_owned());
    index(&[a100, of("h100", h100_mib, "H100")])
}

/// Pods of this shape have come before, and are no longer there.
fn came(index: &mut Index, shape: &Shape, pods: u32) {
    assert_eq!(index.study(shape), Studied::Done);
    (0..pods).for_each(|_| index.seen(shape));
}

#[test]
fn what_pods_choose_by_selectors_is_left_to_them() {
    let mut index = two_products(40_000, 40_000);
    assert_eq!(put(&mut index, "1", mib(10_000), Policy::Pack), "a100/gpu-0", "nobody seeks anything");
    let chooses = with(selecting(&[A100]), |want| want.part = Part::Memory(Bytes::from_mib(30_000)));
    came(&mut index, &chooses, 20);
    assert_eq!(put(&mut index, "2", mib(10_000), Policy::Pack), "h100/gpu-0", "not the GPU in use");
    assert_eq!(put(&mut index, "3", chooses, Policy::Pack), "a100/gpu-1");
    for nth in 4..11 {
        assert!(put(&mut index, &nth.to_string(), mib(10_000), Policy::Pack).starts_with("h100/"), "{nth}");
    }
    assert_eq!(put(&mut index, "11", mib(10_000), Policy::Pack), "a100/gpu-1", "where nothing else will do");
}

#[test]
fn large_gpus_are_left_to_what_fits_on_no_other() {
    let mut index = two_products(80_000, 30_000);
    came(&mut index, &mib(50_000), 20);
    // On an H100 that has a share of 50,000 MiB, 30,000 would leave nothing.
    assert_eq!(put(&mut index, "1", mib(50_000), Policy::Pack), "h100/gpu-0");
    assert_eq!(put(&mut index, "2", mib(20_000), Policy::Pack), "a100/gpu-0");
    assert_eq!(put(&mut index, "3", mib(30_000), Policy::Pack), "a100/gpu-1");
    assert_eq!(put(&mut index, "4", mib(30_000), Policy::Pack), "h100/gpu-0");
}

#[test]
fn what_everybody_can_do_without_changes_nothing() {
    let mut index = two_products(40_000, 40_000);
    let all = selecting(&[&A100.replace("== 'A100'", "!= 'B200'")]);
    came(&mut index, &all, 20);
    came(&mut index, &mib(10_000), 20);
    let spots: Vec<String> =
        (0..4).map(|nth| put(&mut index, &nth.to_string(), mib(10_000), Policy::Pack)).collect();
    assert_eq!(spots, ["a100/gpu-0"; 4]);
}
