//! Which API server a person means, and what it answers in the words that people know from kubectl.

use std::env;
use std::path::PathBuf;

use clap::Args;

use super::UsageError;
use crate::cluster::{CallError, Endpoint, Impersonation, KubeCluster};

/// How an administrator lets somebody see what `tranche top` and `tranche explain` look at: all pods, so not a tenant.
pub const BINDING: &str =
    "kubectl create clusterrolebinding tranche-viewer --clusterrole tranche-viewer --user NAME";
/// Kinds that belong to no namespace.
const OF_CLUSTER: [&str; 8] =
    ["nodes", "namespaces", "resourceslices", "deviceclasses", "devicetaintrules", "users", "groups", "uids"];

/// As kubectl is told it.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Cluster")]
pub struct ReachArgs {
    /// Kubeconfig, or several separated by colons [default: the pod's service account, else ~/.kube/config].
    #[arg(long, env = "KUBECONFIG", hide_env_values = true)]
    pub kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig [default: its current one].
    #[arg(long, value_name = "NAME")]
    pub context: Option<String>,
    /// Ask as this user, or as system:serviceaccount:NAMESPACE:NAME, in place of yourself.
    #[arg(long = "as", value_name = "USER")]
    pub as_user: Option<String>,
    /// Ask as a member of this group, too; may be given several times.
    #[arg(long, value_name = "GROUP")]
    pub as_group: Vec<String>,
    /// Ask as the user of this UID.
    #[arg(long, value_name = "UID")]
    pub as_uid: Option<String>,
}

impl ReachArgs {
    /// A client for the cluster that is meant. Connects at the first call.
    ///
    /// # Errors
    /// [`UsageError`]: no cluster is named, the kubeconfig cannot be used, or a group is named without a user.
    pub async fn connect(&self) -> Result<KubeCluster, UsageError> {
        let (endpoint, impersonation) = (self.endpoint()?, self.impersonation()?);
        let connected = KubeCluster::connect_as(&endpoint, impersonation.as_ref()).await;
        connected.map_err(|error| UsageError(crate::model::error_chain(&error)))
    }

    /// Whom to ask as. As kubectl has it, groups and a UID are somebody's.
    fn impersonation(&self) -> Result<Option<Impersonation>, UsageError> {
        let given = |flag: &str, value: &str| match value.bytes().all(|byte| (b' '..0x7f).contains(&byte)) {
            true => Ok(value.to_owned()),
            false => Err(UsageError(format!(
                "{flag} {value:?}: a name in a request's header has printable ASCII only"
            ))),
        };
        let groups: Result<Vec<String>, UsageError> =
            self.as_group.iter().map(|group| given("--as-group", group)).collect();
        let uid = self.as_uid.as_deref().map(|uid| given("--as-uid", uid)).transpose()?;
        match (self.as_user.as_deref().filter(|user| !user.is_empty()), groups?) {
            (Some(user), groups) => Ok(Some(Impersonation { user: given("--as", user)?, groups, uid })),
            (None, groups) if groups.is_empty() && uid.is_none() => Ok(None),
            (None, _) => Err(UsageError(
                "--as-group and --as-uid are of a user: give --as USER as well (kubectl says: requesting \
                 impersonation without impersonating a user)"
                    .to_owned(),
            )),
        }
    }

    /// The kubeconfig that was named, else the pod's service account, else `~/.kube/config`.
    ///
    /// # Errors
    /// There is none of them, or a context of the service account was named.
    fn endpoint(&self) -> Result<Endpoint, UsageError> {
        let context = self.context.clone();
        if let Some(path) = self.kubeconfig.clone().filter(|path| !path.as_os_str().is_empty()) {
            return Ok(Endpoint::Kubeconfig { path, context });
        }
        if env::var_os("KUBERNETES_SERVICE_HOST").is_some() {
            return match context {
                None => Ok(Endpoint::InCluster),
                Some(context) => Err(UsageError(format!(
                    "--context {context}: a pod's service account has no contexts; give --kubeconfig as well"
                ))),
            };
        }
        let home = env::home_dir().map(|home| home.join(".kube/config")).filter(|path| path.exists());
        home.map(|path| Endpoint::Kubeconfig { path, context }).ok_or_else(|| {
            UsageError("no cluster to ask: there is no ~/.kube/config; give --kubeconfig".to_owned())
        })
    }
}

/// A failed call, for the person who asked: who may not look is told which right is missing, and whom to ask.
pub fn for_people(error: CallError) -> anyhow::Error {
    match error {
        CallError::Forbidden { message, .. } if message.contains("Unauthorized") => anyhow::anyhow!(
            "Error from server (Unauthorized): the API server does not know who you are; has the token or the \
             certificate of your kubeconfig expired?"
        ),
        CallError::Forbidden { message, .. } if message.contains("cannot impersonate") => {
            let check = can_i(&message).map_or(String::new(), |command| format!("; see {command}"));
            anyhow::anyhow!("Error from server (Forbidden): {message}{check}")
        }
        CallError::Forbidden { message, .. } => {
            let check = can_i(&message).map_or(String::new(), |command| format!("see {command}, and "));
            anyhow::anyhow!(
                "Error from server (Forbidden): {message}; {check}ask for ClusterRole tranche-viewer ({BINDING})"
            )
        }
        CallError::NotFound { message, .. } => anyhow::anyhow!("Error from server (NotFound): {message}"),
        CallError::Refused { code: 404, what, .. } => anyhow::anyhow!(
            "Error from server (NotFound): {what}: the server does not have this kind; resource.k8s.io/v1 is served by \
             Kubernetes 1.34 and newer: kubectl api-resources --api-group resource.k8s.io"
        ),
        other => other.into(),
    }
}

/// The command that asks for the right which the API server found missing, by its own sentence.
fn can_i(message: &str) -> Option<String> {
    let (_, rest) = message.split_once("cannot ")?;
    let (verb, rest) = rest.split_once(" resource \"")?;
    let (kind, rest) = rest.split_once('"')?;
    let (_, rest) = rest.split_once("in API group \"")?;
    let (group, rest) = rest.split_once('"')?;
    let kind = if group.is_empty() { kind.to_owned() } else { format!("{kind}.{group}") };
    let namespace = rest.split_once("in the namespace \"").and_then(|(_, rest)| rest.split_once('"'));
    let scope = match namespace {
        Some((namespace, _)) => format!(" -n {namespace}"),
        None if OF_CLUSTER.iter().any(|one| kind.split('.').next() == Some(one)) => String::new(),
        None => " -A".to_owned(),
    };
    Some(format!("kubectl auth can-i {verb} {kind}{scope}"))
}

/// Any failure, for the person who asked: of a call that got no answer, where the API server was looked for.
pub fn told(cluster: &KubeCluster, error: anyhow::Error) -> anyhow::Error {
    let server = cluster.server().unwrap_or_default();
    match error.downcast::<CallError>() {
        Ok(CallError::Unreachable { source, .. }) => anyhow::anyhow!(
            "the API server {server} cannot be reached: {}; does the cluster run, and is the address in your kubeconfig \
             right? (kubectl config view --minify)",
            innermost(source.as_ref())
        ),
        Ok(CallError::TimedOut { limit, .. }) => anyhow::anyhow!(
            "the API server {server} does not answer within {} s; does the cluster run, and is the address in your \
             kubeconfig right? (kubectl config view --minify)",
            limit.as_secs()
        ),
        Ok(other) => for_people(other),
        Err(error) => error,
    }
}

/// What was wrong in the end, without the number of the system's error.
fn innermost(error: &(dyn std::error::Error + 'static)) -> String {
    let mut last = error;
    while let Some(source) = last.source() {
        last = source;
    }
    let words = last.to_string();
    let words = words.rsplit_once(" (os error ").map_or(words.as_str(), |(words, _)| words);
    let words = words.trim_start_matches("failed to lookup address information: ");
    match words.split_at_checked(1) {
        Some((first, rest)) => format!("{}{rest}", first.to_lowercase()),
        None => words.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_right_that_is_missing_is_asked_for_by_kubectls_own_command() {
        let in_namespace = r#"pods is forbidden: User "eve" cannot list resource "pods" in API group "" in the namespace "ml""#;
        assert_eq!(can_i(in_namespace).as_deref(), Some("kubectl auth can-i list pods -n ml"));
        let everywhere = r#"x: User "eve" cannot list resource "resourceclaims" in API group "resource.k8s.io" at the cluster scope"#;
        assert_eq!(
            can_i(everywhere).as_deref(),
            Some("kubectl auth can-i list resourceclaims.resource.k8s.io -A")
        );
        let nodes = r#"User "eve" cannot get resource "nodes" in API group "" at the cluster scope"#;
        assert_eq!(can_i(nodes).as_deref(), Some("kubectl auth can-i get nodes"));
        assert_eq!(can_i("no"), None);
        let other = r#"users "eve" is forbidden: User "bob" cannot impersonate resource "users" in API group "" at the cluster scope"#;
        assert_eq!(can_i(other).as_deref(), Some("kubectl auth can-i impersonate users"));
    }

    #[test]
    fn answers_of_the_server_begin_as_kubectls_do() {
        let what = || "GET pods ml/a".to_owned();
        let words = |error| for_people(error).to_string();
        let not_found = CallError::NotFound { what: what(), message: "pods \"a\" not found".to_owned() };
        assert_eq!(words(not_found), "Error from server (NotFound): pods \"a\" not found");
        let unknown = CallError::Forbidden { what: what(), message: "Unauthorized".to_owned() };
        assert!(
            words(unknown).starts_with("Error from server (Unauthorized): the API server does not know who")
        );
        let not_served = CallError::Refused { what: what(), code: 404, message: "404 page".to_owned() };
        assert!(words(not_served).contains("Kubernetes 1.34 and newer"));
    }
}
