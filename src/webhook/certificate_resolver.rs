//! The certificate in use, looked up at each handshake: replacing it disturbs no connection.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::SystemTime;

use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;

use super::certificate::Serving;

/// Clones hold the same certificate. Empty at first: handshakes fail until there is one.
#[derive(Clone, Default)]
pub struct CertificateResolver(Arc<RwLock<Option<Serving>>>);

impl CertificateResolver {
    /// Serves this one from now on. False: it is the one that is served already.
    pub fn set(&self, serving: Serving) -> bool {
        let mut held = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let is_new = held.as_ref().is_none_or(|before| before.key.cert != serving.key.cert);
        *held = Some(serving);
        is_new
    }

    pub fn not_after(&self) -> Option<SystemTime> {
        self.0.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|serving| serving.not_after)
    }
}

impl fmt::Debug for CertificateResolver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CertificateResolver").field("not_after", &self.not_after()).finish()
    }
}

impl ResolvesServerCert for CertificateResolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        let held = self.0.read().unwrap_or_else(PoisonError::into_inner);
        held.as_ref().map(|serving| serving.key.clone())
    }
}
