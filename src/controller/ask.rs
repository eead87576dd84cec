//! What waits, as the allocator is asked for it; and its answer, as claims are granted it.

use std::collections::{BTreeMap, BTreeSet};

use crate::allocate::{AttributeConstraint, GpuGrant, Part, Placement, Rule, Shape, Want};
use crate::controller::wants::{Constraint, Wants};
use crate::feasible::Resources;
use crate::select::QualifiedName;

/// All that a pod's open claims want, of one node.
///
/// # Errors
/// In words for the claim's author: an attribute has no domain, or compute differs. Selectors are looked at by whoever
/// decides.
pub fn shape(claims: &[Wants], room: Resources) -> Result<Shape, String> {
    let mut shape =
        Shape { cpu_milli: room.cpu_milli, memory: room.memory, pods: room.pods, ..Shape::default() };
    for (number, claim) in claims.iter().enumerate() {
        let first = shape.wants.len();
        for want in &claim.requests {
            let claim = u32::try_from(number).unwrap_or(u32::MAX);
            let (selectors, tolerations) = (want.selectors.clone(), want.tolerations.read.clone());
            shape.wants.push(Want { claim, selectors, tolerations, ..Want::of(&want.share, want.gpus) });
        }
        let mut seen = BTreeSet::new();
        for constraint in claim.constraints.iter() {
            let alike = alike(claim, first, constraint)?;
            if !alike.wants.is_empty() && seen.insert(alike.clone()) {
                shape.alike.push(alike);
            }
        }
    }
    // Where one claim has several GPUs, the others of the pod keep off them.
    if is_several(&shape) {
        same_compute(&shape)?;
        shape.wants.iter_mut().for_each(|want| want.claim = 0);
    }
    Ok(shape)
}

/// A claim among them wants shares of several GPUs, which one MPS daemon serves. Whole GPUs and MIG devices have none.
pub fn is_several(shape: &Shape) -> bool {
    let mut gpus: BTreeMap<u32, u32> = BTreeMap::new();
    parts_of_gpus(shape).any(|want| {
        let of_claim = gpus.entry(want.claim).or_default();
        *of_claim = of_claim.saturating_add(want.gpus);
        *of_claim > 1
    })
}

fn parts_of_gpus(shape: &Shape) -> impl Iterator<Item = &Want> {
    shape.wants.iter().filter(|want| want.part != Part::Whole && !want.is_mig())
}

/// MPS has one compute limit for all GPUs of a process.
fn same_compute(shape: &Shape) -> Result<(), String> {
    let mut first = BTreeMap::new();
    let mut differs = |want: &Want| *first.entry(want.claim).or_insert(want.compute) != want.compute;
    match parts_of_gpus(shape).any(&mut differs) {
        true => {
            Err("its requests have different compute, and MPS has one limit for all GPUs of a process; give \
                     each the same compute, or write a claim for each"
                .to_owned())
        }
        false => Ok(()),
    }
}

fn alike(claim: &Wants, first: usize, constraint: &Constraint) -> Result<AttributeConstraint, String> {
    let attribute = QualifiedName::full(&constraint.attribute).ok_or_else(|| {
        let field = match constraint.rule {
            Rule::Same => "matchAttribute",
            Rule::Different => "distinctAttribute",
        };
        let text = &constraint.attribute;
        format!("{field} {text:?} has no domain; write one such as gpu.nvidia.com/productName")
    })?;
    let wants = claim.requests.iter().enumerate().filter(|(_, want)| constraint.is_for(&want.request));
    let (wants, gpus): (Vec<usize>, Vec<u32>) = wants.map(|(at, want)| (first + at, want.gpus)).unzip();
    // One GPU has to have the attribute, whatever the rule.
    let rule = if gpus == [1] { Rule::Same } else { constraint.rule };
    Ok(AttributeConstraint { rule, attribute, wants })
}

/// The GPUs of each request of each claim, in the order in which they were asked for.
pub fn parts(claims: &[Wants], placement: &Placement) -> Vec<Vec<Vec<GpuGrant>>> {
    let mut want = 0..;
    let mut of_next = || {
        let want = want.next();
        placement.gpus.iter().filter(|grant| Some(grant.want) == want).cloned().collect::<Vec<_>>()
    };
    claims.iter().map(|wants| wants.requests.iter().map(|_| of_next()).collect()).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::model::names::RequestName;
    use crate::model::quantity::Bytes;
    use crate::model::share::Extent;
    use crate::params::{Amount, GpuShare};

    fn want(request: &str, selectors: &[&str]) -> crate::controller::wants::Want {
        crate::controller::wants::Want {
            request: RequestName::new(request),
            share: GpuShare { amount: Some(Amount::Memory(Bytes::from_mib(1000))), ..GpuShare::default() },
            gpus: 1,
            selectors: selectors.iter().map(|text| (*text).to_owned()).collect(),
            tolerations: Default::default(),
        }
    }

    #[test]
    fn the_wants_of_all_claims_stand_in_one_row_and_their_answers_go_back_to_them() {
        let one = Wants { requests: vec![want("a", &[])], constraints: Arc::default() };
        let constraint = |attribute: &str, requests: &[&str]| Constraint {
            rule: Rule::Same,
            attribute: attribute.to_owned(),
            requests: requests.iter().map(|name| (*name).to_owned()).collect(),
        };
        let constraints =
            vec![constraint("gpu.nvidia.com/productName", &["y"]), constraint("gpu.nvidia.com/uuid", &["z"])];
        let two = Wants {
            requests: vec![want("x", &["device.driver == 'gpu.nvidia.com'"]), want("y", &[])],
            constraints: constraints.into(),
        };
        let claims = [one, two];
        let shape = shape(&claims, Resources::default()).unwrap();
        let claims_of = |shape: &Shape| shape.wants.iter().map(|want| want.claim).collect::<Vec<_>>();
        assert_eq!(
            claims_of(&shape),
            [0, 0, 0],
            "GPUs of a claim that has several are not shared with the others"
        );
        let singles = [
            Wants { requests: vec![want("a", &[])], constraints: Arc::default() },
            Wants { requests: vec![want("b", &[])], constraints: Arc::default() },
        ];
        assert_eq!(claims_of(&super::shape(&singles, Resources::default()).unwrap()), [0, 1]);
        assert_eq!((shape.alike.len(), &shape.alike[0].wants), (1, &vec![2]));
        let grant = |want: usize, device: &str| GpuGrant {
            want,
            device: device.into(),
            memory: Bytes::from_mib(1000),
            compute: None,
            slots: 1,
            extent: Extent::Part,
        };
        let gpus = vec![grant(2, "gpu-0"), grant(0, "gpu-1"), grant(1, "gpu-1")];
        let placement = Placement { node: "a".into(), gpus, cpu_milli: 0, memory: Bytes(0), pods: 0 };
        let devices = parts(&claims, &placement);
        let names = |at: usize, request: usize| devices[at][request][0].device.to_string();
        assert_eq!([names(0, 0), names(1, 0), names(1, 1)], ["gpu-1", "gpu-1", "gpu-0"]);
    }

    #[test]
    fn whole_gpus_are_no_group_and_have_no_compute_limit() {
        let whole = |gpus| crate::controller::wants::Want {
            share: GpuShare { amount: Some(Amount::Fraction("1".parse().unwrap())), ..GpuShare::default() },
            gpus,
            ..want("whole", &[])
        };
        let of = |requests| {
            shape(&[Wants { requests, constraints: Arc::default() }], Resources::default()).unwrap()
        };
        let four = of(vec![whole(4)]);
        assert!(!is_several(&four));
        assert_eq!(four.wants[0].compute.map(|percent| percent.get()), Some(100));
        assert!(!is_several(&of(vec![whole(4), want("part", &[])])), "one share has no group either");
        let two = crate::controller::wants::Want { gpus: 2, ..want("parts", &[]) };
        assert!(is_several(&of(vec![whole(1), two])));
    }

    #[test]
    fn what_cannot_be_asked_for_is_told() {
        let bad = Wants {
            requests: vec![want("a", &[])],
            constraints: [Constraint {
                rule: Rule::Different,
                attribute: "productName".to_owned(),
                requests: vec![],
            }]
            .into(),
        };
        assert!(shape(&[bad], Resources::default()).unwrap_err().starts_with("distinctAttribute"));
    }
}
