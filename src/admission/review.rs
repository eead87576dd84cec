//! `admission.k8s.io/v1`: the question as the API server puts it, and the answer as it wants it.

use json_patch::Patch;
use serde::Deserialize;
use serde_json::{Value, json};
use thiserror::Error;

use super::reading::{self, Keep, Objects, Unread, VALUES_MAX};

const API_VERSION: &str = "admission.k8s.io/v1";
/// The API server passes on no more of a warning than this (bytes, all of a request together: 4 Ki).
const WARNING_BYTES_MAX: usize = 256;
/// A UUID has 36.
const UID_BYTES_MAX: usize = 128;
/// Of a refusal: more help nobody, and each repeats what was sent.
const PROBLEMS_MAX: usize = 16;
const WORDS_BYTES_MAX: usize = 1024;

/// Why a body cannot be answered. The text goes back to who sent it.
#[derive(Debug, Error)]
pub enum ReviewError {
    #[error(
        "the body is not a valid AdmissionReview: {0}; send what the API server sends to a webhook of \
         {API_VERSION}"
    )]
    Unreadable(#[source] serde_json::Error),
    #[error(
        "the body is a {kind:?} of {version:?}; this webhook answers an AdmissionReview of {API_VERSION}"
    )]
    OtherKind { kind: String, version: String },
    #[error(
        "the AdmissionReview has no request.uid of at most {UID_BYTES_MAX} bytes, without which there can be \
         no answer"
    )]
    NoUid,
}

/// What a review is about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReviewSubject {
    Claim,
    Template,
    Pod,
    Other,
}

/// How it was decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReviewVerdict {
    Allowed,
    Changed,
    Refused,
}

/// The AdmissionReview to send back, and what it says.
#[derive(Debug, Clone, PartialEq)]
pub struct ReviewAnswer {
    pub subject: ReviewSubject,
    pub verdict: ReviewVerdict,
    /// Whose object it is, `namespace/name` as far as it has one, for the log.
    pub object: String,
    pub review: Value,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "UPPERCASE")]
pub(super) enum Operation {
    Create,
    Update,
    Delete,
    Connect,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Review {
    #[serde(default)]
    api_version: String,
    #[serde(default)]
    kind: String,
    request: Option<Head>,
}

/// All of a request but the objects, which are passed over.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Head {
    #[serde(default)]
    uid: String,
    kind: ObjectKind,
    operation: Operation,
    #[serde(default)]
    sub_resource: String,
    #[serde(default)]
    namespace: String,
    #[serde(default)]
    name: String,
}

#[derive(Debug)]
pub(super) struct ReviewRequest {
    pub uid: String,
    kind: ObjectKind,
    pub operation: Operation,
    sub_resource: String,
    pub namespace: String,
    pub name: String,
    /// What is looked at of it. Null for deletions, for what is not looked at, and if it is [`Self::too_much`].
    pub object: Value,
    /// Null for creations, too.
    pub old_object: Value,
    too_much: Option<&'static str>,
}

#[derive(Debug, Deserialize)]
struct ObjectKind {
    #[serde(default)]
    group: String,
    kind: String,
}

/// Something that is wrong with an object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Problem {
    /// The field's path, e.g. `spec.devices.config[0].opaque.parameters.memory`.
    pub field: String,
    pub words: String,
}

#[derive(Debug)]
pub(super) enum ReviewDecision {
    Allow,
    /// Left as it is, with words to its author, if there are any.
    Warn(Vec<String>),
    /// Changed, perhaps with words to its author.
    Change(Patch, Vec<String>),
    Refuse(Vec<Problem>),
}

impl ReviewSubject {
    /// As a metric's label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Template => "template",
            Self::Pod => "pod",
            Self::Other => "other",
        }
    }
}

impl ReviewVerdict {
    /// As a metric's label.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Allowed => "allowed",
            Self::Changed => "changed",
            Self::Refused => "refused",
        }
    }
}

impl ReviewRequest {
    pub(super) fn read(body: &[u8]) -> Result<Self, ReviewError> {
        let mut request = Self::read_head(body)?;
        if let Some(keep) = request.looked_at() {
            match reading::objects(body, keep) {
                Ok(Objects { object, old_object }) => {
                    (request.object, request.old_object) = (object, old_object)
                }
                Err(Unread::TooMuch(which)) => request.too_much = Some(which),
                Err(Unread::Broken(error)) => return Err(ReviewError::Unreadable(error)),
            }
        }
        Ok(request)
    }

    /// The same without its objects, which are passed over.
    pub(super) fn read_head(body: &[u8]) -> Result<Self, ReviewError> {
        let review: Review = serde_json::from_slice(body).map_err(ReviewError::Unreadable)?;
        let head = match review {
            Review { api_version, kind, .. } if api_version != API_VERSION || kind != "AdmissionReview" => {
                return Err(ReviewError::OtherKind {
                    kind: shortened(kind),
                    version: shortened(api_version),
                });
            }
            Review { request: Some(head), .. } if (1..=UID_BYTES_MAX).contains(&head.uid.len()) => head,
            _ => return Err(ReviewError::NoUid),
        };
        let Head { uid, kind, operation, sub_resource, namespace, name } = head;
        let (object, old_object) = (Value::Null, Value::Null);
        Ok(Self { uid, kind, operation, sub_resource, namespace, name, object, old_object, too_much: None })
    }

    fn looked_at(&self) -> Option<&'static Keep> {
        let written = matches!(self.operation, Operation::Create | Operation::Update);
        match self.subject() {
            _ if !written || self.is_of_subresource() => None,
            ReviewSubject::Claim => Some(&reading::CLAIM),
            ReviewSubject::Template => Some(&reading::TEMPLATE),
            ReviewSubject::Pod => Some(&reading::POD),
            ReviewSubject::Other => Some(&reading::WORKLOAD),
        }
    }

    /// Why it cannot be looked at.
    pub(super) fn too_much(&self) -> Option<Problem> {
        self.too_much.map(|which| Problem {
            field: which.to_owned(),
            words: format!(
                "has more than {VALUES_MAX} values, which is more than any use needs; write fewer, or split \
                 the object"
            ),
        })
    }

    pub(super) fn subject(&self) -> ReviewSubject {
        match (self.kind.group.as_str(), self.kind.kind.as_str()) {
            ("resource.k8s.io", "ResourceClaim") => ReviewSubject::Claim,
            ("resource.k8s.io", "ResourceClaimTemplate") => ReviewSubject::Template,
            ("", "Pod") => ReviewSubject::Pod,
            _ => ReviewSubject::Other,
        }
    }

    pub(super) fn is_of_subresource(&self) -> bool {
        !self.sub_resource.is_empty()
    }

    pub(super) fn answer(&self, decision: ReviewDecision) -> ReviewAnswer {
        let mut response = json!({"uid": self.uid, "allowed": true});
        let verdict = match decision {
            ReviewDecision::Allow => ReviewVerdict::Allowed,
            ReviewDecision::Warn(words) => {
                if !words.is_empty() {
                    response["warnings"] = words.into_iter().map(shortened).collect();
                }
                ReviewVerdict::Allowed
            }
            ReviewDecision::Change(patch, _) if patch.0.is_empty() => ReviewVerdict::Allowed,
            ReviewDecision::Change(patch, words) => {
                if !words.is_empty() {
                    response["warnings"] = words.into_iter().map(shortened).collect();
                }
                response["patchType"] = json!("JSONPatch");
                response["patch"] = json!(base64(patch.to_string().as_bytes()));
                ReviewVerdict::Changed
            }
            ReviewDecision::Refuse(problems) => {
                response["allowed"] = json!(false);
                response["status"] = self.status(&problems);
                ReviewVerdict::Refused
            }
        };
        let review = json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "response": response});
        ReviewAnswer {
            subject: self.subject(),
            verdict,
            object: cut(format!("{}/{}", self.namespace, self.name()), WORDS_BYTES_MAX),
            review,
        }
    }

    /// `metav1.Status`: one line per problem for people, one cause per problem for programs.
    fn status(&self, problems: &[Problem]) -> Value {
        let shown = problems.iter().take(PROBLEMS_MAX);
        let shown: Vec<(String, String)> = shown
            .map(|Problem { field, words }| (field.clone(), cut(words.clone(), WORDS_BYTES_MAX)))
            .collect();
        let mut lines: Vec<String> = shown.iter().map(|(field, words)| format!("{field}: {words}")).collect();
        if let more @ 1.. = problems.len() - shown.len() {
            lines.push(format!("and {more} more"));
        }
        let message = match lines.as_slice() {
            [one] => one.clone(),
            several => format!("{} fields to change:\n  {}", problems.len(), several.join("\n  ")),
        };
        let causes: Vec<Value> = shown
            .iter()
            .map(|(field, words)| json!({"reason": "FieldValueInvalid", "field": field, "message": words}))
            .collect();
        json!({"status": "Failure", "code": 422, "reason": "Invalid", "message": message,
            "details": {"group": self.kind.group, "kind": self.kind.kind, "name": self.name(), "causes": causes}})
    }

    /// Or the beginning of it, where the API server has yet to choose the rest.
    fn name(&self) -> &str {
        match self.name.as_str() {
            "" => self.object["metadata"]["generateName"].as_str().unwrap_or_default(),
            name => name,
        }
    }
}

fn shortened(words: String) -> String {
    cut(words, WARNING_BYTES_MAX)
}

/// Between characters.
fn cut(mut words: String, bytes: usize) -> String {
    words.truncate(words.floor_char_boundary(bytes));
    words
}

/// RFC 4648 with padding: how JSON carries bytes.
fn base64(bytes: &[u8]) -> Value {
    // k8s-openapi's own encoding of a byte string.
    serde_json::to_value(k8s_openapi::ByteString(bytes.to_vec())).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admission::{KnownClasses, mutate, validate};

    fn refused(body: &str) -> String {
        let error = validate(body.as_bytes(), &KnownClasses::default()).expect_err(body);
        assert_eq!(error.to_string(), mutate(body.as_bytes()).expect_err(body).to_string());
        error.to_string()
    }

    #[test]
    fn what_is_no_review_is_refused_with_words() {
        for (body, words) in [
            ("", "not a valid AdmissionReview"),
            ("{", "not a valid AdmissionReview"),
            ("[]", "not a valid AdmissionReview"),
            ("{}", "is a \"\" of \"\""),
            (r#"{"apiVersion":"admission.k8s.io/v1beta1","kind":"AdmissionReview"}"#, "v1beta1"),
            (r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview"}"#, "no request.uid"),
            (
                r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"kind":{"kind":"Pod"},"operation":"CREATE"}}"#,
                "no request.uid",
            ),
            (
                r#"{"apiVersion":"admission.k8s.io/v1","kind":"AdmissionReview","request":{"uid":"a","kind":{"kind":"Pod"},"operation":"EXPLODE"}}"#,
                "EXPLODE",
            ),
        ] {
            assert!(refused(body).contains(words), "{body}: {}", refused(body));
        }
    }

    #[test]
    fn other_kinds_are_let_through_with_their_uid() {
        let body = json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": {
            "uid": "u-1", "kind": {"group": "apps", "version": "v1", "kind": "Deployment"},
            "operation": "CREATE", "object": {"spec": {}}}});
        let bytes = serde_json::to_vec(&body).unwrap();
        for answer in [validate(&bytes, &KnownClasses::of(&[])).unwrap(), mutate(&bytes).unwrap()] {
            assert_eq!((answer.subject, answer.verdict), (ReviewSubject::Other, ReviewVerdict::Allowed));
            assert_eq!(answer.review["response"], json!({"uid": "u-1", "allowed": true}));
        }
    }

    #[test]
    fn one_problem_is_one_line_and_several_are_a_list() {
        let problem = |field: &str| Problem { field: field.to_owned(), words: "is odd".to_owned() };
        let body = json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": {
            "uid": "u", "kind": {"kind": "Pod"}, "name": "p", "operation": "CREATE"}});
        let request = ReviewRequest::read(body.to_string().as_bytes()).unwrap();
        let one = request.status(&[problem("a")]);
        assert_eq!(one["message"], "a: is odd");
        assert_eq!((&one["details"]["kind"], &one["details"]["name"]), (&json!("Pod"), &json!("p")));
        let both = request.status(&[problem("a"), problem("b")]);
        assert_eq!(both["message"], "2 fields to change:\n  a: is odd\n  b: is odd");
        assert_eq!(both["details"]["causes"][1]["field"], "b");
    }

    #[test]
    fn of_many_problems_the_first_are_told_and_each_in_few_words() {
        let problems = vec![Problem { field: "a".to_owned(), words: "é".repeat(WORDS_BYTES_MAX) }; 40];
        let body = json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": {
            "uid": "u", "kind": {"kind": "Pod"}, "name": "p", "operation": "CREATE"}});
        let status = ReviewRequest::read(body.to_string().as_bytes()).unwrap().status(&problems);
        let message = status["message"].as_str().unwrap();
        assert!(message.starts_with("40 fields to change:\n  a: é") && message.ends_with("\n  and 24 more"));
        assert!(message.len() < PROBLEMS_MAX * (WORDS_BYTES_MAX + 10));
        assert_eq!(status["details"]["causes"].as_array().unwrap().len(), PROBLEMS_MAX);
    }

    #[test]
    fn an_object_of_too_many_values_is_refused_and_not_passed_on() {
        let many = vec![json!({"": 0}); VALUES_MAX];
        for (group, kind, object) in [
            ("resource.k8s.io", "ResourceClaim", json!({"spec": {"devices": {"requests": many}}})),
            ("", "Pod", json!({"spec": {"containers": many}})),
        ] {
            let body = json!({"apiVersion": API_VERSION, "kind": "AdmissionReview", "request": {
                "uid": "u", "kind": {"group": group, "kind": kind}, "operation": "CREATE", "object": object}});
            let bytes = body.to_string();
            let answer = match kind {
                "Pod" => mutate(bytes.as_bytes()),
                _ => validate(bytes.as_bytes(), &KnownClasses::of(&[])),
            };
            let answer = answer.unwrap();
            assert_eq!(answer.verdict, ReviewVerdict::Refused, "{kind}");
            let message = answer.review["response"]["status"]["message"].as_str().unwrap();
            assert!(message.starts_with("object: has more than 16384 values"), "{message}");
        }
    }

    #[test]
    fn long_warnings_are_cut_between_characters() {
        assert_eq!(shortened("é".repeat(200)).chars().count(), 128);
        assert_eq!(shortened("short".to_owned()), "short");
    }
}
