//! What waits, as the allocator is asked for it; and its answer, as claims are granted it.

use super::wants::Wants;
use crate::allocate::{Alike, GpuGrant, Placement, Shape, Want};
use crate::feasible::Room;
use crate::select::{QualifiedName, Selector};

/// All that a pod's open claims want, of one node.
///
/// # Errors
/// In words for the claim's author: a selector is no CEL, or an attribute has no domain.
pub fn shape(claims: &[Wants], room: Room) -> Result<Shape, String> {
    let mut shape = Shape { cpu_milli: room.cpu_milli, memory: room.memory, ..Shape::default() };
    for (number, claim) in claims.iter().enumerate() {
        let first = shape.wants.len();
        for want in &claim.requests {
            for text in &want.selectors {
                Selector::compile(text).map_err(|error| format!("request {}: {error}", want.request))?;
            }
            let claim = u32::try_from(number).unwrap_or(u32::MAX);
            let (selectors, tolerations) = (want.selectors.clone(), want.bears());
            shape.wants.push(Want { claim, selectors, tolerations, ..Want::of(&want.share, want.gpus) });
        }
        for (attribute, requests) in &claim.same {
            shape.alike.push(alike(claim, first, attribute, requests)?);
        }
    }
    // Where one claim has several GPUs, the others of the pod keep off them.
    if is_several(&shape) {
        same_compute(&shape)?;
        shape.wants.iter_mut().for_each(|want| want.claim = 0);
    }
    Ok(shape)
}

/// A claim among them wants several GPUs.
pub fn is_several(shape: &Shape) -> bool {
    shape.wants.iter().any(|want| {
        let of_claim = shape.wants.iter().filter(|other| other.claim == want.claim);
        of_claim.fold(0, |sum: u32, want| sum.saturating_add(want.gpus)) > 1
    })
}

/// MPS has one compute limit for all GPUs of a process.
fn same_compute(shape: &Shape) -> Result<(), String> {
    let differs = |want: &Want| {
        let same = |other: &&Want| other.claim == want.claim && other.compute != want.compute;
        shape.wants.iter().find(same).is_some()
    };
    match shape.wants.iter().any(differs) {
        true => {
            Err("its requests have different compute, and MPS has one limit for all GPUs of a process; give \
                     each the same compute, or write a claim for each"
                .to_owned())
        }
        false => Ok(()),
    }
}

fn alike(claim: &Wants, first: usize, attribute: &str, requests: &[String]) -> Result<Alike, String> {
    let name = QualifiedName::full(attribute);
    let attribute = name.ok_or_else(|| {
        format!("matchAttribute {attribute:?} has no domain; write one such as gpu.nvidia.com/productName")
    })?;
    let meant = |name: &str| requests.is_empty() || requests.iter().any(|one| one == name);
    let wants = claim.requests.iter().enumerate().filter(|(_, want)| meant(want.request.as_str()));
    Ok(Alike { attribute, wants: wants.map(|(at, _)| first + at).collect() })
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
    use super::*;
    use crate::model::names::RequestName;
    use crate::model::quantity::Bytes;
    use crate::params::{Amount, GpuShare};

    fn want(request: &str, selectors: &[&str]) -> super::super::wants::Want {
        super::super::wants::Want {
            request: RequestName::new(request),
            share: GpuShare { amount: Some(Amount::Memory(Bytes::from_mib(1000))), ..GpuShare::default() },
            gpus: 1,
            selectors: selectors.iter().map(|text| (*text).to_owned()).collect(),
            tolerations: vec![],
        }
    }

    #[test]
    fn the_wants_of_all_claims_stand_in_one_row_and_their_answers_go_back_to_them() {
        let one = Wants { requests: vec![want("a", &[])], same: vec![] };
        let same = vec![("gpu.nvidia.com/productName".to_owned(), vec!["y".to_owned()])];
        let two =
            Wants { requests: vec![want("x", &["device.driver == 'gpu.nvidia.com'"]), want("y", &[])], same };
        let claims = [one, two];
        let shape = shape(&claims, Room::default()).unwrap();
        let claims_of = |shape: &Shape| shape.wants.iter().map(|want| want.claim).collect::<Vec<_>>();
        assert_eq!(
            claims_of(&shape),
            [0, 0, 0],
            "GPUs of a claim that has several are not shared with the others"
        );
        let singles = [
            Wants { requests: vec![want("a", &[])], same: vec![] },
            Wants { requests: vec![want("b", &[])], same: vec![] },
        ];
        assert_eq!(claims_of(&super::shape(&singles, Room::default()).unwrap()), [0, 1]);
        assert_eq!(shape.alike[0].wants, [2]);
        let grant = |want: usize, device: &str| GpuGrant {
            want,
            device: device.into(),
            memory: Bytes::from_mib(1000),
            compute: None,
            slots: 1,
        };
        let gpus = vec![grant(2, "gpu-0"), grant(0, "gpu-1"), grant(1, "gpu-1")];
        let placement = Placement { node: "a".into(), gpus, cpu_milli: 0, memory: Bytes(0) };
        let devices = parts(&claims, &placement);
        let names = |at: usize, request: usize| devices[at][request][0].device.to_string();
        assert_eq!([names(0, 0), names(1, 0), names(1, 1)], ["gpu-1", "gpu-1", "gpu-0"]);
    }

    #[test]
    fn what_cannot_be_asked_for_is_told() {
        let bad = Wants { requests: vec![want("a", &["device.driver =="])], same: vec![] };
        assert!(shape(&[bad], Room::default()).unwrap_err().contains("request a"));
        let bad = Wants { requests: vec![want("a", &[])], same: vec![("productName".to_owned(), vec![])] };
        assert!(shape(&[bad], Room::default()).unwrap_err().contains("has no domain"));
    }
}
