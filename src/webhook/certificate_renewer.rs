//! Keeps a certificate that lasts, the API server's trust in it, and what is known of DeviceClasses.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures::StreamExt;
use futures::stream::{BoxStream, pending, select};
use thiserror::Error;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::certificate::{self, AUTHORITIES, CHAIN, CertificateError, Data, Held, KEY, Renewal, Serving};
use super::certificate_resolver::CertificateResolver;
use super::config::{Certificates, Own, WebhookTiming};
use super::metrics::WebhookMetrics;
use crate::admission::KnownClasses;
use crate::cluster::CallError;
use crate::cluster::webhooks::{StoredSecret, WebhookApi};
use crate::model::error_chain;
use crate::model::time::back_off;
use crate::ops::readiness::Token;

/// After a failed round; doubled after each further one, up to the usual time between rounds.
const BACKOFF: Duration = Duration::from_secs(1);
/// Replicas that start together make one Secret: the others read what the first has written.
const TRIES: usize = 5;
/// Events of DeviceClasses that are taken together.
const CLASS_EVENTS_MAX: usize = 256;

/// Why a round did not get through. The certificate in use stays in use.
#[derive(Debug, Error)]
enum KeepError {
    #[error("the webhook's certificates cannot be kept")]
    Call(#[from] CallError),
    #[error("the webhook's certificate cannot be made")]
    Make(#[source] CertificateError),
    #[error("the webhook's certificate in {} cannot be used; the one before stays in use", .0.display())]
    Folder(PathBuf, #[source] CertificateError),
    #[error("{} cannot be read; mount the folder with the webhook's certificate there", .0.display())]
    File(PathBuf, #[source] io::Error),
    #[error(
        "something else changes the webhook's Secret all the time; look for a second installation in the \
         namespace"
    )]
    Contended,
}

pub(super) struct CertificateRenewer {
    pub api: WebhookApi,
    pub certificates: Certificates,
    pub timing: WebhookTiming,
    pub certificate_resolver: CertificateResolver,
    pub classes: watch::Sender<Arc<KnownClasses>>,
    pub metrics: WebhookMetrics,
}

impl CertificateRenewer {
    /// Runs until told. Drops `ready` once there is a certificate that the API server trusts.
    pub async fn run(self, ready: Token, stop: CancellationToken) {
        let mut ready = Some(ready);
        let mut failures = 0_u32;
        let mut events = self.events();
        // What comes at once is one piece of news.
        let mut classes = self.api.watch_classes().ready_chunks(CLASS_EVENTS_MAX);
        loop {
            let pause = match self.round().await {
                Ok(()) => {
                    drop(ready.take());
                    failures = 0;
                    self.timing.check
                }
                Err(error) => {
                    self.metrics.certificate_failures.inc();
                    failures = failures.saturating_add(1);
                    let pause = back_off(BACKOFF, failures, self.timing.check);
                    warn!(error = error_chain(&error), "tried again in {} s", pause.as_secs_f32());
                    pause
                }
            };
            self.learn_classes().await;
            let due = tokio::time::sleep(pause);
            tokio::pin!(due);
            loop {
                tokio::select! {
                    () = stop.cancelled() => return,
                    () = &mut due => break,
                    // Somebody has changed a configuration, perhaps its caBundle.
                    _ = events.next() => break,
                    _ = classes.next() => self.learn_classes().await,
                }
            }
        }
    }

    fn events(&self) -> BoxStream<'static, ()> {
        match &self.certificates {
            Certificates::Own(own) => {
                let [first, second] = own.configurations();
                select(self.api.watch_configurations(&first), self.api.watch_configurations(&second)).boxed()
            }
            Certificates::Files(_) => pending().boxed(),
        }
    }

    async fn round(&self) -> Result<(), KeepError> {
        match &self.certificates {
            Certificates::Own(own) => self.keep(own).await,
            Certificates::Files(folder) => self.take(read(folder).await?),
        }
    }

    /// Trust first, then service.
    async fn keep(&self, own: &Own) -> Result<(), KeepError> {
        let (bundle, serving) = self.secret(own).await?;
        let trusted = self.tell(own, &bundle).await;
        self.take(serving)?;
        trusted
    }

    async fn tell(&self, own: &Own, bundle: &[u8]) -> Result<(), KeepError> {
        for name in own.configurations() {
            let found = match self.api.configurations(&name).await {
                // With a role of before there was one.
                Err(CallError::Forbidden { .. }) if name != own.configuration => continue,
                found => found?,
            };
            for configuration in found {
                if self.api.trust(&configuration, bundle).await? {
                    self.metrics.bundle_writes.inc();
                    info!(name, "the webhook configuration names our CA");
                }
            }
        }
        Ok(())
    }

    fn take(&self, serving: Serving) -> Result<(), KeepError> {
        let not_after = serving.not_after.duration_since(UNIX_EPOCH).unwrap_or_default();
        if self.certificate_resolver.set(serving) {
            self.metrics.certificate_not_after.set(not_after.as_secs_f64());
            info!(not_after = not_after.as_secs(), "a new certificate is served");
        }
        Ok(())
    }

    /// The Secret's CA bundle and certificate, after making what is due.
    async fn secret(&self, own: &Own) -> Result<(Vec<u8>, Serving), KeepError> {
        for _ in 0..TRIES {
            let stored = self.api.secret(&own.namespace, &own.secret).await?;
            let held = stored.as_ref().map(|stored| Held::read(&stored.data));
            let (held, fresh) = match held {
                Some(Ok(held)) => match self.fresh(own, &held)? {
                    None => {
                        let bundle = stored.and_then(|stored| stored.data.get(AUTHORITIES).cloned());
                        return Ok((bundle.unwrap_or_default(), held.serving));
                    }
                    Some(fresh) => (stored, fresh),
                },
                Some(Err(error)) => {
                    // As the chart makes it, it is empty.
                    if stored.as_ref().is_some_and(|stored| !stored.data.is_empty()) {
                        warn!(
                            error = error_chain(&error),
                            secret = own.secret,
                            "the webhook's Secret is made again"
                        );
                    }
                    (stored, self.made(own)?)
                }
                None => (None, self.made(own)?),
            };
            self.write(own, held, fresh).await?;
        }
        Err(KeepError::Contended)
    }

    fn made(&self, own: &Own) -> Result<Data, KeepError> {
        certificate::made(&own.names, own.lifetimes, now()).map_err(KeepError::Make)
    }

    fn fresh(&self, own: &Own, held: &Held) -> Result<Option<Data>, KeepError> {
        let now = now();
        let fresh = match held.due(&own.names, own.lifetimes, now) {
            Renewal::Nothing => return Ok(None),
            Renewal::Serving => held.with_new_serving(&own.names, own.lifetimes, now),
            Renewal::Authority => held.with_new_authority(own.lifetimes, now),
            Renewal::All => certificate::made(&own.names, own.lifetimes, now),
        };
        fresh.map(Some).map_err(KeepError::Make)
    }

    /// A conflict is no failure: what the other has written is read next.
    async fn write(&self, own: &Own, stored: Option<StoredSecret>, data: Data) -> Result<(), KeepError> {
        let written = match stored {
            Some(stored) => self.api.replace_secret(&stored, data).await,
            None => self.api.create_secret(&own.namespace, &own.secret, data).await,
        };
        match written {
            Ok(_) => {
                self.metrics.certificate_renewals.inc();
                info!(secret = own.secret, "the webhook's certificates were renewed");
                Ok(())
            }
            Err(CallError::Conflict { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    }

    /// Classes that cannot be read are not known: nothing is refused because of them.
    async fn learn_classes(&self) {
        let known = match self.api.device_classes().await {
            Ok(read) if read.is_all => KnownClasses::of(&read.classes),
            Ok(read) => KnownClasses::of_some(&read.classes),
            Err(error) => {
                warn!(error = error_chain(&error), "claims without an amount are left to the controller");
                KnownClasses::default()
            }
        };
        self.classes.send_if_modified(|before| {
            let is_other = **before != known;
            *before = Arc::new(known);
            is_other
        });
    }
}

#[expect(clippy::disallowed_methods, reason = "the libraries of certificates have times so")]
fn now() -> SystemTime {
    SystemTime::now()
}

async fn read(folder: &Path) -> Result<Serving, KeepError> {
    let read = async |name: &str| {
        let path = folder.join(name);
        tokio::fs::read(&path).await.map_err(|source| KeepError::File(path, source))
    };
    let (chain, key) = (read(CHAIN).await?, read(KEY).await?);
    // Files that are being replaced do not match for a moment: that is seen here, and tried again.
    Serving::read(&chain, &key).map_err(|source| KeepError::Folder(folder.to_owned(), source))
}
