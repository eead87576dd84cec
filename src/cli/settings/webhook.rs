//! What the flags of the webhook mean.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use super::{BadSettings, LogSettings, Reader, address, both, duration, given, interval, log};
use crate::cli::args::{LogArgs, WebhookArgs, WebhookRunArgs};
use crate::model::names::is_dns_subdomain;
use crate::webhook::{Callers, Certificates, Lifetimes, Own, RunSettings, WebhookSettings, WebhookTiming};

const ADDRESS: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), 9443);
const SERVICE: &str = "tranche-webhook";
const SECRET: &str = "tranche-webhook-tls";
const CONFIGURATION: &str = "tranche";
/// Below it the API server's own delays would matter.
const LIFE_MIN: Duration = Duration::from_secs(10);
const LIFE_MAX: Duration = Duration::from_secs(10 * 366 * 24 * 60 * 60);

/// As [`super::log_and_node`].
///
/// # Errors
/// Every mistake in the flags.
pub fn log_and_webhook(
    log_args: LogArgs,
    args: WebhookRunArgs,
) -> Result<(LogSettings, RunSettings), BadSettings> {
    both(log(log_args), alone(args))
}

fn alone(args: WebhookRunArgs) -> Result<RunSettings, BadSettings> {
    let WebhookRunArgs { webhook, pod_namespace, ops, kubeconfig } = args;
    let mut reader = Reader::default();
    let namespace = given(pod_namespace).unwrap_or_default();
    if namespace.is_empty() {
        reader.mistake("--pod-namespace", "is required; in a pod take it from metadata.namespace");
    }
    let webhook = reader.webhook(webhook, &namespace);
    if webhook.is_none() {
        reader.mistake("--webhook-address", "off leaves this process nothing to do; give an address");
    }
    let ops_address = reader.ops(ops);
    let kubeconfig = given(kubeconfig).map(|path| reader.path("--kubeconfig", Some(path), ""));
    match webhook {
        Some(webhook) => reader.finish(RunSettings { webhook, ops_address, kubeconfig }),
        None => Err(BadSettings(reader.0)),
    }
}

impl Reader {
    /// None: it is switched off. `namespace` is this process's own.
    pub(super) fn webhook(&mut self, args: WebhookArgs, namespace: &str) -> Option<WebhookSettings> {
        let WebhookArgs {
            webhook_address,
            webhook_certificates,
            webhook_names,
            webhook_client_ca,
            webhook_client_names,
            webhook_secret,
            webhook_configuration,
            webhook_certificate_life,
            webhook_check_interval,
        } = args;
        let usual = WebhookTiming::DEFAULT;
        let own = Own {
            namespace: namespace.to_owned(),
            secret: self.parsed("--webhook-secret", webhook_secret, SECRET.to_owned(), object_name),
            configuration: self.parsed(
                "--webhook-configuration",
                webhook_configuration,
                CONFIGURATION.to_owned(),
                object_name,
            ),
            names: self.parsed(
                "--webhook-names",
                webhook_names,
                vec![format!("{SERVICE}.{namespace}.svc")],
                names,
            ),
            lifetimes: self.parsed(
                "--webhook-certificate-life",
                webhook_certificate_life,
                Lifetimes::DEFAULT,
                lifetimes,
            ),
        };
        let folder = given(webhook_certificates);
        let certificates = match folder.map(|path| self.path("--webhook-certificates", Some(path), "")) {
            Some(folder) => Certificates::Files(folder),
            None => Certificates::Own(own),
        };
        let callers = self.callers(webhook_client_ca, webhook_client_names);
        let check = self.parsed("--webhook-check-interval", webhook_check_interval, usual.check, interval);
        let served = self.parsed("--webhook-address", webhook_address, Some(ADDRESS), |text| match text {
            "off" => Ok(None),
            text => address(text).map(Some),
        });
        let timing = WebhookTiming { check, ..usual };
        served.map(|address| WebhookSettings { address, certificates, callers, timing })
    }

    fn callers(&mut self, file: Option<String>, names: Option<String>) -> Option<Callers> {
        const NAMES: &str = "--webhook-client-names";
        let split = |text: &str| Ok(text.split(',').map(|name| name.trim().to_owned()).collect());
        let names: Vec<String> = self.parsed(NAMES, names, Vec::new(), split);
        match given(file) {
            Some(path) => {
                let authorities = self.path("--webhook-client-ca", Some(path), "");
                Some(Callers { authorities, names })
            }
            None if names.is_empty() => None,
            None => {
                self.mistake(
                    NAMES,
                    "has no effect without --webhook-client-ca, which names the CAs of callers",
                );
                None
            }
        }
    }
}

fn object_name(text: &str) -> Result<String, String> {
    match is_dns_subdomain(text) {
        true => Ok(text.to_owned()),
        false => Err(format!("{text:?} is not a valid object name; write lower-case letters, digits and -")),
    }
}

fn names(text: &str) -> Result<Vec<String>, String> {
    let names = text.split(',').map(str::trim).map(|name| match name.parse::<IpAddr>() {
        Ok(address) => Ok(address.to_string()),
        Err(_) => object_name(name).map_err(|_| format!("{name:?} is not a valid host name or address")),
    });
    names.collect()
}

fn lifetimes(text: &str) -> Result<Lifetimes, String> {
    let life = duration(text).ok_or_else(|| {
        format!("{text:?} is not a valid duration; write a whole number and a unit (s, m, h), such as 2160h")
    })?;
    match (LIFE_MIN..=LIFE_MAX).contains(&life) {
        true => Ok(Lifetimes::of_serving(life)),
        false => Err(format!("{text:?} is out of range; write 10s to 87840h")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args() -> WebhookRunArgs {
        WebhookRunArgs { pod_namespace: Some("tranche-system".to_owned()), ..WebhookRunArgs::default() }
    }

    #[test]
    fn a_namespace_is_enough() {
        let settings = alone(args()).unwrap();
        assert_eq!(settings.webhook.address.to_string(), "0.0.0.0:9443");
        let Certificates::Own(own) = settings.webhook.certificates else { panic!("not its own") };
        assert_eq!(own.names, ["tranche-webhook.tranche-system.svc"]);
        assert_eq!((own.secret.as_str(), own.configuration.as_str()), ("tranche-webhook-tls", "tranche"));
        assert_eq!(own.lifetimes, Lifetimes::DEFAULT);
    }

    #[test]
    fn certificates_may_be_somebody_elses_and_the_webhook_off() {
        let mut args = args();
        args.webhook.webhook_certificates = Some("/tls/".to_owned());
        assert_eq!(alone(args.clone()).unwrap().webhook.certificates, Certificates::Files("/tls".into()));
        args.webhook.webhook_address = Some("off".to_owned());
        assert_eq!(Reader::default().webhook(args.webhook.clone(), "a"), None);
        assert!(alone(args).unwrap_err().to_string().contains("off leaves this process nothing to do"));
    }

    #[test]
    fn all_mistakes_are_told_at_once() {
        let webhook = WebhookArgs {
            webhook_address: Some("9443".to_owned()),
            webhook_certificates: Some("tls".to_owned()),
            webhook_names: Some("a.svc,A b".to_owned()),
            webhook_client_ca: None,
            webhook_client_names: Some("kube-apiserver".to_owned()),
            webhook_secret: Some("Secret".to_owned()),
            webhook_configuration: None,
            webhook_certificate_life: Some("1s".to_owned()),
            webhook_check_interval: Some("often".to_owned()),
        };
        let args = WebhookRunArgs { webhook, ..WebhookRunArgs::default() };
        let words = alone(args).unwrap_err().to_string();
        for part in [
            "8 to change",
            "--webhook-client-names (or TRANCHE_WEBHOOK_CLIENT_NAMES): has no effect without --webhook-client-ca",
            "--pod-namespace (or POD_NAMESPACE): is required",
            "--webhook-secret (or TRANCHE_WEBHOOK_SECRET): \"Secret\" is not a valid object name",
            "--webhook-names (or TRANCHE_WEBHOOK_NAMES): \"A b\" is not a valid host name",
            "--webhook-certificate-life (or TRANCHE_WEBHOOK_CERTIFICATE_LIFE): \"1s\" is out of range",
            "--webhook-certificates (or TRANCHE_WEBHOOK_CERTIFICATES): \"tls\" is not absolute",
            "--webhook-check-interval (or TRANCHE_WEBHOOK_CHECK_INTERVAL): \"often\" is not a valid duration",
            "--webhook-address (or TRANCHE_WEBHOOK_ADDRESS): \"9443\" is not a valid address",
        ] {
            assert!(words.contains(part), "{part} is missing from\n{words}");
        }
    }
}
