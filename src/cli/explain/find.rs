//! What a person named: a claim, a pod, or what makes pods; and what they may have meant if there is none.

use std::path::PathBuf;

use anyhow::anyhow;

use super::super::UsageError;
use super::ExplainArgs;
use crate::cluster::WorkloadKind;
use crate::controller::view::ClusterView;

/// So many names are offered in place of one that is not there.
const OFFERS_MAX: usize = 3;
/// So many letters may be added, left out or exchanged in a name that is still similar.
const EDITS_MAX: usize = 2;

/// Words for a pod and for a claim, as kubectl takes them.
const PODS: [&str; 3] = ["pod", "pods", "po"];
const CLAIMS: [&str; 3] = ["resourceclaim", "resourceclaims", "claim"];

/// `pod NAME` as `pod/NAME`.
fn one_word(kind: &str, name: &str) -> Result<String, UsageError> {
    let is_kind = PODS.contains(&kind) || CLAIMS.contains(&kind) || WorkloadKind::of(kind).is_some();
    match is_kind {
        true => Ok(format!("{kind}/{name}")),
        false => Err(UsageError(format!(
            "{kind:?} is not a kind that can be explained; give pod, resourceclaim, {} before the name, or one name alone",
            WorkloadKind::ALL.map(WorkloadKind::as_str).join(", ").to_lowercase()
        ))),
    }
}

/// What is asked about. `namespace`: as far as it was named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExplainTarget {
    Claim {
        namespace: Option<String>,
        name: String,
    },
    Pod {
        namespace: Option<String>,
        name: String,
    },
    Workload {
        kind: WorkloadKind,
        namespace: Option<String>,
        name: String,
    },
    /// The pods of a file.
    File {
        namespace: Option<String>,
        path: PathBuf,
    },
}

/// The same with its namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NamedObject {
    /// `claim`, `pod`, `deployment` and so on, or `file`.
    pub kind: String,
    pub namespace: String,
    pub name: String,
}

impl ExplainTarget {
    /// # Errors
    /// It is no name, or two namespaces are named.
    pub fn parse(args: &ExplainArgs) -> Result<Self, UsageError> {
        let given = args.namespace.clone().filter(|namespace| !namespace.is_empty());
        let text = match (&args.what, &args.filename) {
            (Some(what), None) => match &args.name {
                Some(name) => one_word(what, name)?,
                None => what.clone(),
            },
            (None, Some(path)) => return Ok(Self::File { namespace: given, path: path.clone() }),
            (None, None) | (Some(_), Some(_)) => {
                return Err(UsageError("give what to explain, or a file with a pod (-f)".to_owned()));
            }
        };
        let wrong = |why: &str| {
            UsageError(format!("{text:?} {why}; give NAME, NAMESPACE/NAME, pod/NAME or deployment/NAME"))
        };
        let text = text.as_str();
        let parts: Vec<&str> = text.split('/').collect();
        let word = |part: &&str| {
            !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b"-.".contains(&b))
        };
        if !parts.iter().all(word) {
            return Err(wrong("is not a valid name of a claim or a pod"));
        }
        if let [kind, name] = parts.as_slice()
            && let Some(kind) = WorkloadKind::of(kind)
        {
            return Ok(Self::Workload { kind, namespace: given, name: (*name).to_owned() });
        }
        match parts.as_slice() {
            [name] => Ok(Self::Claim { namespace: given, name: (*name).to_owned() }),
            [kind, name] if PODS.contains(kind) => {
                Ok(Self::Pod { namespace: given, name: (*name).to_owned() })
            }
            [kind, name] if CLAIMS.contains(kind) => {
                Ok(Self::Claim { namespace: given, name: (*name).to_owned() })
            }
            [namespace, name] => match given.filter(|given| given != namespace) {
                None => {
                    Ok(Self::Claim { namespace: Some((*namespace).to_owned()), name: (*name).to_owned() })
                }
                Some(given) => Err(wrong(&format!("and -n {given} name two namespaces"))),
            },
            _ => Err(wrong("has too many parts")),
        }
    }

    pub fn at(&self, default: impl FnOnce() -> String) -> NamedObject {
        let (kind, namespace, name) = match self {
            Self::Claim { namespace, name } => ("claim".to_owned(), namespace, name.clone()),
            Self::Pod { namespace, name } => ("pod".to_owned(), namespace, name.clone()),
            Self::Workload { kind, namespace, name } => {
                (kind.as_str().to_lowercase(), namespace, name.clone())
            }
            Self::File { namespace, path } => ("file".to_owned(), namespace, path.display().to_string()),
        };
        NamedObject { kind, namespace: namespace.clone().unwrap_or_else(default), name }
    }
}

impl NamedObject {
    /// Another object of the same namespace.
    pub fn pod(&self, name: &str) -> Self {
        Self { kind: "pod".to_owned(), namespace: self.namespace.clone(), name: name.to_owned() }
    }
}

impl std::fmt::Display for NamedObject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// There is no such claim: what there is instead.
pub fn no_claim(view: &ClusterView, named: &NamedObject) -> anyhow::Error {
    let pod = view.pods().any(|pod| pod.at.namespace == named.namespace && pod.at.name == named.name);
    if pod {
        let NamedObject { namespace, name, .. } = named;
        return anyhow!(
            "there is no claim {name} in namespace {namespace}, but a pod of that name: ask for pod/{name}"
        );
    }
    let claims = view.claims();
    nothing(named, claims.map(|claim| (claim.namespace(), claim.name())))
}

/// There is no such pod.
pub fn no_pod(view: &ClusterView, named: &NamedObject) -> anyhow::Error {
    let pods = view.pods().map(|pod| &pod.at);
    nothing(named, pods.map(|pod| (pod.namespace.as_str(), pod.name.as_str())))
}

fn nothing<'a>(named: &NamedObject, all: impl Iterator<Item = (&'a str, &'a str)> + Clone) -> anyhow::Error {
    let NamedObject { kind, namespace, name } = named;
    let there = all.clone().filter(|(of, _)| of == namespace);
    let mut similar: Vec<(usize, &str)> =
        there.clone().filter_map(|(_, other)| Some((distance(name, other)?, other))).collect();
    similar.sort_unstable();
    similar.dedup();
    let offers: Vec<&str> = similar.iter().take(OFFERS_MAX).map(|(_, other)| *other).collect();
    let mut words = format!("there is no {kind} {name} in namespace {namespace}");
    if !offers.is_empty() {
        words.push_str(&format!("; similar there: {}", offers.join(", ")));
    }
    let mut others: Vec<&str> =
        all.filter(|(of, other)| other == name && of != namespace).map(|(of, _)| of).collect();
    others.sort_unstable();
    others.truncate(OFFERS_MAX);
    match others.as_slice() {
        [] if offers.is_empty() => match there.count() {
            0 => words.push_str(&format!(", and no other {kind} either; is it in another namespace? (-n)")),
            count => words.push_str(&format!(", and none of a similar name among the {count} there")),
        },
        [] => {}
        others => words.push_str(&format!("; there is one of that name in {}", others.join(", "))),
    }
    anyhow!(words)
}

/// How far a name is from another, if they are similar: generated names begin with what they were made of.
fn distance(name: &str, other: &str) -> Option<usize> {
    let edits = strsim::levenshtein(name, other);
    let part = !name.is_empty() && (other.starts_with(name) || name.starts_with(other));
    (edits <= EDITS_MAX || part).then_some(edits)
}
