//! Who may call, where the API server shows a certificate: checked at the handshake, before anything is read.

use std::fs;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{CertificateError, DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};
use thiserror::Error;
use tracing::{info, warn};
use x509_parser::extensions::GeneralName;

use super::config::Callers;
use crate::model::error_chain;

/// Why the CAs of callers cannot be used.
#[derive(Debug, Error)]
pub enum CallersError {
    #[error("the file cannot be read")]
    File(#[source] io::Error),
    #[error("it is not a valid PEM file of certificates")]
    Pem(#[source] pem::Error),
    #[error("a certificate in it cannot be used")]
    Certificate(#[source] rustls::Error),
    #[error("it names no CA")]
    Unusable(#[source] rustls::server::VerifierBuilderError),
}

/// Clones are the same.
#[derive(Debug, Clone)]
pub struct CallerGuard(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    settings: Callers,
    provider: Arc<CryptoProvider>,
    current: RwLock<Current>,
}

#[derive(Debug)]
struct Current {
    bytes: Vec<u8>,
    verifier: Arc<dyn ClientCertVerifier>,
}

impl CallerGuard {
    pub fn new(settings: Callers, provider: Arc<CryptoProvider>) -> Result<Self, CallersError> {
        let current = RwLock::new(read(&settings, &provider)?);
        Ok(Self(Arc::new(Inner { settings, provider, current })))
    }

    /// Reads the file again every so often, for ever. What cannot be read leaves what was read before.
    pub async fn keep(&self, every: Duration) {
        let Inner { settings, provider, current } = &*self.0;
        loop {
            tokio::time::sleep(every).await;
            match read(settings, provider) {
                Ok(now) => {
                    let mut current = current.write().unwrap_or_else(PoisonError::into_inner);
                    if current.bytes != now.bytes {
                        info!(file = %settings.authorities.display(), "the CAs of callers have changed");
                        *current = now;
                    }
                }
                Err(error) => warn!(
                    file = %settings.authorities.display(),
                    error = error_chain(&error),
                    "the CAs of callers cannot be read again; the earlier ones stay in use"
                ),
            }
        }
    }

    fn verifier(&self) -> Arc<dyn ClientCertVerifier> {
        self.0.current.read().unwrap_or_else(PoisonError::into_inner).verifier.clone()
    }

    fn is_meant(&self, certificate: &CertificateDer<'_>) -> bool {
        let wanted = &self.0.settings.names;
        wanted.is_empty() || names(certificate).iter().any(|name| wanted.contains(name))
    }
}

fn read(settings: &Callers, provider: &Arc<CryptoProvider>) -> Result<Current, CallersError> {
    let bytes = fs::read(&settings.authorities).map_err(CallersError::File)?;
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_slice_iter(&bytes) {
        roots.add(certificate.map_err(CallersError::Pem)?).map_err(CallersError::Certificate)?;
    }
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider.clone()).build();
    Ok(Current { verifier: verifier.map_err(CallersError::Unusable)?, bytes })
}

/// Common names and DNS names.
fn names(certificate: &CertificateDer<'_>) -> Vec<String> {
    let Ok((_, certificate)) = x509_parser::parse_x509_certificate(certificate) else { return Vec::new() };
    let common = certificate.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let mut names: Vec<String> = common.map(str::to_owned).collect();
    if let Ok(Some(more)) = certificate.subject_alternative_name() {
        names.extend(more.value.general_names.iter().filter_map(|name| match name {
            GeneralName::DNSName(name) => Some((*name).to_owned()),
            _ => None,
        }));
    }
    names
}

impl ClientCertVerifier for CallerGuard {
    /// None: a caller with one certificate shows that.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        chain: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.verifier().verify_client_cert(certificate, chain, now)?;
        match self.is_meant(certificate) {
            true => Ok(verified),
            false => Err(CertificateError::ApplicationVerificationFailure.into()),
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier().verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.verifier().verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.verifier().supported_verify_schemes()
    }
}
