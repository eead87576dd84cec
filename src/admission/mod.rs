//! What the API server asks before it stores something, and what it is told: claims whose parameters nobody
//! could use are refused while their author is still looking, and pods with KAI's annotations get a claim.
//!
//! * [`validate`]: ResourceClaims and ResourceClaimTemplates, `resource.k8s.io/v1`, `v1beta2`, `v1beta1`
//! * [`problems`]: the same of a spec by itself, for people who ask before they send it
//! * [`mutate`]: pods with `gpu-fraction` or `gpu-memory`, and what makes such pods of a template
//! * [`claim_spec`]: the claim that a pod's annotation [`SHARE_ANNOTATION`] asks for
//! * [`ShareClasses`]: the DeviceClasses of such claims
//! * [`KnownClasses`]: which DeviceClasses are the controller's, and which say by themselves how much a share is
//! * [`messages`]: the messages that the controller uses, too
//!
//! Both take the bytes of an `admission.k8s.io/v1` AdmissionReview and give the review to answer with. A
//! refusal names every field that is wrong, not only the first. What is not ours is let through unread:
//! other drivers' configuration, other fields, other kinds, updates that leave the spec as it is, deletions.
//!
//! May import: model, params, select. May name: serde, serde_json, thiserror, json_patch, k8s-openapi (as data).

mod claim;
mod classes;
mod kai;
pub mod messages;
mod pod;
mod reading;
mod review;
mod selectors;
mod share;
mod workload;

use serde_json::Value;

pub use classes::{ClassAmount, KnownClasses};
pub use review::{Problem, ReviewAnswer, ReviewError, ReviewSubject, ReviewVerdict};
pub use selectors::{REVIEW_UNITS_MAX, SelectorBudget};
pub use share::{SHARE_ANNOTATION, ShareAnnotationError, ShareClasses, UNCOUNTED, claim_spec, template_spec};

use review::{Operation, ReviewDecision, ReviewRequest};

/// Everything that is wrong with a claim's spec, which stands at `at` of its object: what [`validate`] would refuse.
pub fn problems(spec: &Value, at: &str, classes: &KnownClasses) -> Vec<Problem> {
    claim::problems(spec, at, classes, &mut SelectorBudget::of(u64::MAX))
}

/// Checks a claim or a template.
///
/// # Errors
/// The body is no review that can be answered.
pub fn validate(body: &[u8], classes: &KnownClasses) -> Result<ReviewAnswer, ReviewError> {
    validate_within(body, classes, |_| SelectorBudget::of(u64::MAX)).map(|(answer, _)| answer)
}

/// The same, with a budget for the selectors, which is asked for by the namespace of the request, if at all. Gives what
/// became of it.
///
/// # Errors
/// The body is no review that can be answered.
pub fn validate_within(
    body: &[u8],
    classes: &KnownClasses,
    budget: impl FnOnce(&str) -> SelectorBudget,
) -> Result<(ReviewAnswer, Option<SelectorBudget>), ReviewError> {
    let request = ReviewRequest::read(body)?;
    let below = match request.subject() {
        ReviewSubject::Claim => "",
        ReviewSubject::Template => "spec.",
        ReviewSubject::Pod | ReviewSubject::Other => {
            return Ok((request.answer(ReviewDecision::Allow), None));
        }
    };
    if let Some(problem) = request.too_much() {
        return Ok((request.answer(ReviewDecision::Refuse(vec![problem])), None));
    }
    fn spec<'a>(object: &'a Value, below: &str) -> &'a Value {
        match below {
            "" => &object["spec"],
            _ => &object["spec"]["spec"],
        }
    }
    let (new, old) = (spec(&request.object, below), spec(&request.old_object, below));
    let mut spent = None;
    let decision = match request.operation {
        _ if request.is_of_subresource() => ReviewDecision::Allow,
        Operation::Update if new == old => ReviewDecision::Allow,
        Operation::Create | Operation::Update => {
            let budget = spent.insert(budget(&request.namespace));
            let problems = claim::problems(new, &format!("{below}spec"), classes, budget);
            let untried = budget.is_short().then_some(messages::SELECTORS_UNTRIED);
            let warnings = claim::warning(new, classes).into_iter().chain(untried);
            match problems.is_empty() {
                true => ReviewDecision::Warn(warnings.map(str::to_owned).collect()),
                false => ReviewDecision::Refuse(problems),
            }
        }
        Operation::Delete | Operation::Connect => ReviewDecision::Allow,
    };
    Ok((request.answer(decision), spent))
}

/// Lets a claim or a template through with a warning that it was not checked, its objects unread.
///
/// # Errors
/// The body is no review that can be answered.
pub fn pass_unchecked(body: &[u8]) -> Result<ReviewAnswer, ReviewError> {
    let request = ReviewRequest::read_head(body)?;
    let is_written = matches!(request.operation, Operation::Create | Operation::Update);
    Ok(request.answer(match request.subject() {
        ReviewSubject::Claim | ReviewSubject::Template if is_written && !request.is_of_subresource() => {
            ReviewDecision::Warn(vec![messages::CLAIM_UNCHECKED.to_owned()])
        }
        ReviewSubject::Claim | ReviewSubject::Template | ReviewSubject::Pod | ReviewSubject::Other => {
            ReviewDecision::Allow
        }
    }))
}

/// Gives a new pod with KAI's annotations its claim, and what makes pods of a template (a Job) the template of one. Doing
/// it again changes nothing.
///
/// # Errors
/// The body is no review that can be answered.
pub fn mutate(body: &[u8]) -> Result<ReviewAnswer, ReviewError> {
    let request = ReviewRequest::read(body)?;
    let is_new = request.operation == Operation::Create && !request.is_of_subresource();
    let decision = match (request.too_much(), request.subject()) {
        (_, ReviewSubject::Claim | ReviewSubject::Template) => ReviewDecision::Allow,
        _ if !is_new => ReviewDecision::Allow,
        (Some(problem), _) => ReviewDecision::Refuse(vec![problem]),
        (None, ReviewSubject::Pod) => pod::with_share(&request),
        (None, ReviewSubject::Other) => workload::with_share(&request),
    };
    Ok(request.answer(decision))
}
