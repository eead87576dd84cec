//! Certificates: read, judged, made. Takes the time as an argument, so that a life of years can be tried.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose,
};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use rustls::sign::CertifiedKey;
use thiserror::Error;
use x509_parser::extensions::GeneralName;
use x509_parser::prelude::X509Certificate;

/// The Secret's keys: those of a TLS Secret, and the key of the CA.
pub const CHAIN: &str = "tls.crt";
pub const KEY: &str = "tls.key";
pub const AUTHORITIES: &str = "ca.crt";
const AUTHORITY_KEY: &str = "ca.key";
/// Clocks that are behind ours take a new certificate all the same.
const CLOCK_SKEW: Duration = Duration::from_secs(60 * 60);
/// How long a CA is trusted before it signs, at most: the API server learns of it a little later.
const SETTLE: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// What a Secret holds.
pub type Data = BTreeMap<String, Vec<u8>>;

/// Why certificates cannot be used.
#[derive(Debug, Error)]
pub enum CertificateError {
    #[error("{0} is missing")]
    Missing(&'static str),
    #[error("{part} is not a PEM text of the expected kind")]
    Pem { part: &'static str, source: rustls::pki_types::pem::Error },
    #[error("{0} cannot be read")]
    Unreadable(&'static str),
    #[error("the key does not belong to the certificate, or is of a kind that TLS cannot use")]
    Key(#[source] rustls::Error),
    #[error("the CA's key cannot be used")]
    AuthorityKey(#[source] rcgen::Error),
    #[error("a certificate for {names} cannot be made")]
    Make { names: String, source: rcgen::Error },
}

/// How long certificates of our own last.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lifetimes {
    pub authority: Duration,
    pub serving: Duration,
}

impl Lifetimes {
    pub const DEFAULT: Self = Self::of_serving(Duration::from_secs(90 * DAY.as_secs()));

    /// The CA outlives forty certificates: ten years by default.
    pub const fn of_serving(serving: Duration) -> Self {
        Self { authority: Duration::from_secs(serving.as_secs().saturating_mul(40)), serving }
    }
}

/// A certificate that can be served.
#[derive(Debug, Clone)]
pub struct Serving {
    pub key: Arc<CertifiedKey>,
    pub not_after: SystemTime,
    names: BTreeSet<String>,
}

/// What has to be made anew.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    Nothing,
    /// The certificate: it ends soon, or is for other names.
    Serving,
    /// A further CA, to be trusted beside the old one before it is used.
    Authority,
    /// Everything: nothing there can be used.
    All,
}

impl Serving {
    /// From PEM: the certificate, then those that lead to its CA.
    pub fn read(chain: &[u8], key: &[u8]) -> Result<Self, CertificateError> {
        let chain = certificates(CHAIN, chain)?;
        let leaf = chain.first().ok_or(CertificateError::Missing(CHAIN))?;
        let parsed = parsed(CHAIN, leaf)?;
        let (not_after, names) = (not_after(&parsed), names(&parsed));
        let key = PrivateKeyDer::from_pem_slice(key)
            .map_err(|source| CertificateError::Pem { part: KEY, source })?;
        let provider = rustls::crypto::ring::default_provider();
        let key = CertifiedKey::from_der(chain, key, &provider).map_err(CertificateError::Key)?;
        Ok(Self { key: Arc::new(key), not_after, names })
    }
}

/// A Secret of ours, read.
#[derive(Debug)]
pub struct Held {
    pub serving: Serving,
    /// Newest first.
    authorities: Vec<CertificateDer<'static>>,
    authority_key: Vec<u8>,
}

impl Held {
    pub fn read(data: &Data) -> Result<Self, CertificateError> {
        let part = |name| data.get(name).map(Vec::as_slice).ok_or(CertificateError::Missing(name));
        let authorities = certificates(AUTHORITIES, part(AUTHORITIES)?)?;
        let newest = authorities.first().ok_or(CertificateError::Missing(AUTHORITIES))?;
        issuer(newest, part(AUTHORITY_KEY)?)?;
        let serving = Serving::read(part(CHAIN)?, part(KEY)?)?;
        Ok(Self { serving, authority_key: part(AUTHORITY_KEY)?.to_vec(), authorities })
    }

    /// What has to be made anew at this time, for these names.
    pub fn due(&self, wanted: &[String], lifetimes: Lifetimes, now: SystemTime) -> Renewal {
        let ends_within = |not_after: SystemTime, rest: Duration| now + rest >= not_after;
        let Some((begins, ends)) = self.authorities.first().and_then(life) else { return Renewal::All };
        let settled = now >= begins + CLOCK_SKEW + SETTLE.min(lifetimes.serving / 10);
        let names: BTreeSet<String> = wanted.iter().cloned().collect();
        let rest = if settled { lifetimes.serving / 3 } else { Duration::ZERO };
        if ends_within(ends, Duration::ZERO) {
            Renewal::All
        } else if ends_within(ends, lifetimes.serving * 2) {
            Renewal::Authority
        } else if ends_within(self.serving.not_after, rest) || (settled && self.serving.names != names) {
            Renewal::Serving
        } else {
            Renewal::Nothing
        }
    }

    /// A new certificate of the newest CA; the rest stays.
    pub fn with_new_serving(
        &self,
        names: &[String],
        lifetimes: Lifetimes,
        now: SystemTime,
    ) -> Result<Data, CertificateError> {
        let newest = self.authorities.first().ok_or(CertificateError::Missing(AUTHORITIES))?;
        let issuer = issuer(newest, &self.authority_key)?;
        let until = (now + lifetimes.serving).min(life(newest).map_or(now, |(_, ends)| ends));
        let (chain, key) = signed(names, now, until, &issuer)?;
        Ok(Data::from([(CHAIN.to_owned(), chain), (KEY.to_owned(), key)]))
    }

    /// A further CA in front of those that last; the certificate stays.
    pub fn with_new_authority(
        &self,
        lifetimes: Lifetimes,
        now: SystemTime,
    ) -> Result<Data, CertificateError> {
        let (certificate, key, _) = authority(lifetimes, now)?;
        let lasting = self.authorities.iter().filter(|der| life(der).is_some_and(|(_, ends)| ends > now));
        let rest: String = lasting.map(|der| pem(der)).collect();
        Ok(Data::from([
            (AUTHORITIES.to_owned(), (certificate + &rest).into_bytes()),
            (AUTHORITY_KEY.to_owned(), key),
        ]))
    }
}

/// A CA and a certificate, both new.
pub fn made(names: &[String], lifetimes: Lifetimes, now: SystemTime) -> Result<Data, CertificateError> {
    let (certificate, authority_key, issuer) = authority(lifetimes, now)?;
    let (chain, key) = signed(names, now, now + lifetimes.serving, &issuer)?;
    Ok(Data::from([
        (AUTHORITIES.to_owned(), certificate.into_bytes()),
        (AUTHORITY_KEY.to_owned(), authority_key),
        (CHAIN.to_owned(), chain),
        (KEY.to_owned(), key),
    ]))
}

type Authority = Issuer<'static, KeyPair>;

/// PEM of a self-signed certificate and its key.
fn authority(
    lifetimes: Lifetimes,
    now: SystemTime,
) -> Result<(String, Vec<u8>, Authority), CertificateError> {
    let failed = |source| CertificateError::Make { names: "a CA".to_owned(), source };
    // Two that are trusted at once have different names.
    let number = now.duration_since(UNIX_EPOCH).unwrap_or_default().as_millis();
    let mut params = lasting(&[], now, now + lifetimes.authority).map_err(failed)?;
    params.distinguished_name = called(&format!("tranche webhook CA {number}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = params.self_signed(&key).map_err(failed)?;
    Ok((certificate.pem(), key.serialize_pem().into_bytes(), Issuer::new(params, key)))
}

/// PEM of a certificate for these names and its key.
fn signed(
    names: &[String],
    now: SystemTime,
    until: SystemTime,
    issuer: &Authority,
) -> Result<(Vec<u8>, Vec<u8>), CertificateError> {
    let failed = |source| CertificateError::Make { names: names.join(", "), source };
    let mut params = lasting(names, now, until).map_err(failed)?;
    params.distinguished_name = called("tranche webhook");
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
    let key = KeyPair::generate().map_err(failed)?;
    let certificate = params.signed_by(&key, issuer).map_err(failed)?;
    Ok((certificate.pem().into_bytes(), key.serialize_pem().into_bytes()))
}

fn lasting(names: &[String], now: SystemTime, until: SystemTime) -> Result<CertificateParams, rcgen::Error> {
    let mut params = CertificateParams::new(names.to_vec())?;
    params.not_before = (now - CLOCK_SKEW).into();
    params.not_after = until.into();
    Ok(params)
}

fn called(name: &str) -> DistinguishedName {
    let mut called = DistinguishedName::new();
    called.push(DnType::CommonName, name);
    called
}

fn issuer(certificate: &CertificateDer<'_>, key: &[u8]) -> Result<Authority, CertificateError> {
    let key = PrivateKeyDer::from_pem_slice(key)
        .map_err(|source| CertificateError::Pem { part: AUTHORITY_KEY, source })?;
    let key = KeyPair::try_from(&key).map_err(CertificateError::AuthorityKey)?;
    Issuer::from_ca_cert_der(certificate, key).map_err(CertificateError::AuthorityKey)
}

fn certificates(part: &'static str, pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, CertificateError> {
    let all = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>();
    all.map_err(|source| CertificateError::Pem { part, source })
}

fn parsed<'a>(
    part: &'static str,
    der: &'a CertificateDer<'_>,
) -> Result<X509Certificate<'a>, CertificateError> {
    let parsed = x509_parser::parse_x509_certificate(der);
    parsed.map(|(_, certificate)| certificate).map_err(|_| CertificateError::Unreadable(part))
}

/// A CA's first and last moment.
fn life(der: &CertificateDer<'_>) -> Option<(SystemTime, SystemTime)> {
    let certificate = parsed(AUTHORITIES, der).ok()?;
    Some((time(certificate.validity().not_before), not_after(&certificate)))
}

fn not_after(certificate: &X509Certificate<'_>) -> SystemTime {
    time(certificate.validity().not_after)
}

fn time(time: x509_parser::time::ASN1Time) -> SystemTime {
    UNIX_EPOCH + Duration::from_secs(u64::try_from(time.timestamp()).unwrap_or(0))
}

fn names(certificate: &X509Certificate<'_>) -> BTreeSet<String> {
    let Ok(Some(extension)) = certificate.subject_alternative_name() else { return BTreeSet::new() };
    extension.value.general_names.iter().filter_map(name).collect()
}

fn name(name: &GeneralName<'_>) -> Option<String> {
    match name {
        GeneralName::DNSName(name) => Some((*name).to_owned()),
        GeneralName::IPAddress(bytes) => match **bytes {
            [a, b, c, d] => Some(IpAddr::from([a, b, c, d]).to_string()),
            _ => <[u8; 16]>::try_from(*bytes).ok().map(|bytes| IpAddr::from(bytes).to_string()),
        },
        _ => None,
    }
}

fn pem(der: &CertificateDer<'_>) -> String {
    let config = pem::EncodeConfig::new().set_line_ending(pem::LineEnding::LF);
    pem::encode_config(&pem::Pem::new("CERTIFICATE", der.to_vec()), config)
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIFETIMES: Lifetimes = Lifetimes::of_serving(DAY);

    fn names() -> Vec<String> {
        ["tranche-webhook.tranche-system.svc", "10.96.0.7", "fd00::7"].map(str::to_owned).to_vec()
    }

    fn start() -> SystemTime {
        UNIX_EPOCH + 20_000 * DAY
    }

    fn held(data: &Data) -> Held {
        Held::read(data).unwrap_or_else(|error| panic!("{}", crate::model::error_chain(&error)))
    }

    /// Time goes on in steps of an hour, and what is due is made: the Secret as it is stored, and what the
    /// API server is to trust, at each hour.
    fn years(hours: u32, mut see: impl FnMut(SystemTime, &Held, Renewal)) {
        let mut data = made(&names(), LIFETIMES, start()).unwrap();
        for hour in 0..hours {
            let now = start() + DAY / 24 * hour;
            let before = held(&data);
            let due = before.due(&names(), LIFETIMES, now);
            see(now, &before, due);
            match due {
                Renewal::Nothing => {}
                Renewal::Serving => data.extend(before.with_new_serving(&names(), LIFETIMES, now).unwrap()),
                Renewal::Authority => data.extend(before.with_new_authority(LIFETIMES, now).unwrap()),
                Renewal::All => panic!("nothing should ever end"),
            }
        }
    }

    #[test]
    fn what_is_made_is_read_back_with_its_names_and_its_end() {
        let held = held(&made(&names(), LIFETIMES, start()).unwrap());
        assert_eq!(held.serving.not_after, start() + DAY);
        assert_eq!(held.serving.names, names().into_iter().collect());
        assert_eq!(held.due(&names(), LIFETIMES, start()), Renewal::Nothing);
        assert_eq!(held.due(&names()[..2], LIFETIMES, start() + SETTLE), Renewal::Serving, "other names");
        assert_eq!(held.due(&names(), LIFETIMES, start() + 41 * DAY), Renewal::All, "the CA has ended");
    }

    #[test]
    fn certificates_change_well_before_they_end_and_are_always_of_a_ca_that_was_trusted_before() {
        let (mut changes, mut most) = (BTreeMap::new(), 0);
        let mut trusted: Vec<CertificateDer<'static>> = Vec::new();
        let mut seen: Option<CertificateDer<'static>> = None;
        years(24 * 130, |now, held, due| {
            let leaf = held.serving.key.cert[0].clone();
            if seen.as_ref() != Some(&leaf) {
                // Whoever trusts what was in the bundle an hour ago takes the new certificate.
                let roots = if trusted.is_empty() { &held.authorities } else { &trusted };
                assert!(roots.iter().any(|root| verifies(root, &leaf, now)), "at {now:?}");
                seen = Some(leaf);
            }
            assert!(held.serving.not_after > now + DAY / 4, "it is changed in time");
            trusted = held.authorities.clone();
            most = most.max(trusted.len());
            *changes.entry(format!("{due:?}")).or_insert(0) += 1;
        });
        assert!(changes["Serving"] > 150, "{changes:?}");
        assert!((3..=4).contains(&changes["Authority"]), "{changes:?}");
        assert_eq!(most, 2, "CAs that have ended are dropped");
    }

    #[test]
    fn a_new_ca_is_trusted_for_a_while_before_it_signs() {
        let now = start() + 38 * DAY;
        let mut data = made(&names(), LIFETIMES, start()).unwrap();
        data.extend(held(&data).with_new_serving(&names(), LIFETIMES, now - DAY * 3 / 4).unwrap());
        assert_eq!(held(&data).due(&names(), LIFETIMES, now), Renewal::Authority);
        data.extend(held(&data).with_new_authority(LIFETIMES, now).unwrap());
        let held = held(&data);
        assert_eq!(held.due(&names(), LIFETIMES, now), Renewal::Nothing, "although the certificate is due");
        assert_eq!(held.due(&names(), LIFETIMES, now + SETTLE), Renewal::Serving);
        let ended = now - DAY * 3 / 4 + DAY;
        assert_eq!(held.due(&names(), LIFETIMES, ended), Renewal::Serving);
    }

    /// As a client checks it, at this time.
    fn verifies(root: &CertificateDer<'_>, leaf: &CertificateDer<'_>, now: SystemTime) -> bool {
        use rustls::client::danger::ServerCertVerifier;
        use rustls::pki_types::{ServerName, UnixTime};
        let mut roots = rustls::RootCertStore::empty();
        roots.add(root.clone().into_owned()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = rustls::client::WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider);
        let verifier = builder.build().unwrap();
        let now = UnixTime::since_unix_epoch(now.duration_since(UNIX_EPOCH).unwrap());
        names().into_iter().all(|name| {
            let name = ServerName::try_from(name).unwrap();
            verifier.verify_server_cert(leaf, &[], &name, &[], now).is_ok()
        })
    }

    #[test]
    fn damaged_secrets_are_told_apart() {
        let whole = made(&names(), LIFETIMES, start()).unwrap();
        let other = made(&names(), LIFETIMES, start()).unwrap();
        for (part, bytes, words) in [
            (CHAIN, None, "tls.crt is missing"),
            (CHAIN, Some(b"".to_vec()), "tls.crt is missing"),
            (
                CHAIN,
                Some(b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n".to_vec()),
                "tls.crt cannot be read",
            ),
            (KEY, Some(b"no key".to_vec()), "tls.key is not a PEM text"),
            (KEY, Some(other[KEY].clone()), "does not belong to the certificate"),
            (AUTHORITIES, Some(Vec::new()), "ca.crt is missing"),
            (AUTHORITY_KEY, None, "ca.key is missing"),
            (AUTHORITY_KEY, Some(b"no key".to_vec()), "ca.key is not a PEM text"),
        ] {
            let mut data = whole.clone();
            match bytes {
                Some(bytes) => data.insert(part.to_owned(), bytes),
                None => data.remove(part),
            };
            let error = Held::read(&data).expect_err(words);
            assert!(error.to_string().contains(words), "{words}: {error}");
        }
        assert!(Held::read(&Data::new()).is_err());
    }
}
