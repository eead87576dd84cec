//! Names and places of the two sockets, and clearing away those that dead instances left behind.
//!
//! The registration socket's file name has an `@`: kubelet sends the percent-encoded path as the
//! HTTP/2 `:authority`, and an authority may have percent signs only in front of an `@` (RFC 3986,
//! userinfo). Without it every registration is reset before it reaches us.

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use sha2::{Digest, Sha256};
use tokio::net::UnixStream;
use tokio::time::{sleep, timeout};

use super::Error;
use crate::model::names::PodUid;

/// Bytes of a Unix socket's path, so that the terminating NUL fits into `sun_path` (unix(7)).
pub const MAX_PATH: usize = 107;

/// How long a probed socket may take to accept before it counts as alive.
const PROBE_LIMIT: Duration = Duration::from_secs(1);

/// Where one instance listens.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Sockets {
    /// Kubelet's DRA calls arrive here.
    pub dra: PathBuf,
    /// Kubelet finds us by this one.
    pub registration: PathBuf,
}

impl Sockets {
    /// Places the sockets below kubelet's root directory. With a pod UID the names differ per pod,
    /// as a rolling update with surge needs it; without one they are fixed. Too long paths fall
    /// back to hashed names.
    pub fn place(kubelet_dir: &Path, driver: &str, pod_uid: Option<&str>) -> Result<Self, Error> {
        if !kubelet_dir.is_absolute() || kubelet_dir.to_str().is_none() {
            return Err(Error::KubeletDir(kubelet_dir.to_owned()));
        }
        if let Some(uid) = pod_uid.filter(|uid| PodUid::parse(uid).is_err()) {
            return Err(Error::PodUid(uid.to_owned()));
        }
        Ok(Self {
            dra: first_that_fits(&plugin_dir(kubelet_dir, driver), dra_names(driver, pod_uid))?,
            registration: first_that_fits(&registry_dir(kubelet_dir), registration_names(driver, pod_uid))?,
        })
    }
}

/// `<kubelet dir>/plugins/<driver>`: ours, made if missing.
pub(super) fn plugin_dir(kubelet_dir: &Path, driver: &str) -> PathBuf {
    kubelet_dir.join("plugins").join(driver)
}

/// `<kubelet dir>/plugins_registry`: kubelet's, which it watches.
pub(super) fn registry_dir(kubelet_dir: &Path) -> PathBuf {
    kubelet_dir.join("plugins_registry")
}

fn dra_names(driver: &str, pod_uid: Option<&str>) -> Vec<String> {
    match pod_uid {
        None => vec!["dra.sock".to_owned()],
        Some(uid) => {
            vec![format!("dra-{uid}.sock"), format!("dra-{}.sock", hashed(&[driver, uid], 8))]
        }
    }
}

fn registration_names(driver: &str, pod_uid: Option<&str>) -> Vec<String> {
    match pod_uid {
        None => vec![format!("{driver}@reg.sock"), format!("dra@{}-reg.sock", hashed(&[driver], 8))],
        Some(uid) => vec![
            format!("{driver}@{uid}-reg.sock"),
            format!("{driver}@{}-reg.sock", hashed(&[uid], 8)),
            format!("dra@{}-reg.sock", hashed(&[driver, uid], 16)),
        ],
    }
}

/// The first `bytes` bytes of the parts' SHA-256, in hex. NUL separates the parts.
fn hashed(parts: &[&str], bytes: usize) -> String {
    let digest = Sha256::digest(parts.join("\0"));
    digest.iter().take(bytes).map(|byte| format!("{byte:02x}")).collect()
}

fn first_that_fits(dir: &Path, names: Vec<String>) -> Result<PathBuf, Error> {
    names
        .into_iter()
        .map(|name| dir.join(name))
        .find(|path| path.as_os_str().len() <= MAX_PATH)
        .ok_or_else(|| Error::PathTooLong { dir: dir.to_owned() })
}

/// Removes the sockets of this driver's other instances on which nobody listens any more: of ours
/// in every form of name, and of NVIDIA's driver, which has the same name without the `@`.
/// A socket that is alive, or that only just came up (refused, but not twice `settle` apart), stays.
/// Returns what was removed.
pub(super) async fn sweep(own: &Sockets, driver: &str, settle: Duration) -> Vec<PathBuf> {
    let mut suspects = Vec::new();
    for path in candidates(own, driver) {
        if is_dead(&path).await {
            suspects.push(path);
        }
    }
    if suspects.is_empty() {
        return suspects;
    }
    sleep(settle).await;
    let mut removed = Vec::new();
    for path in suspects {
        if is_dead(&path).await && std::fs::remove_file(&path).is_ok() {
            removed.push(path);
        }
    }
    removed
}

fn candidates(own: &Sockets, driver: &str) -> Vec<PathBuf> {
    let registrations = sockets_in(own.registration.parent(), |name| is_registration(name, driver));
    let endpoints = sockets_in(own.dra.parent(), is_endpoint);
    let mut found: Vec<PathBuf> = registrations.into_iter().chain(endpoints).collect();
    found.retain(|path| *path != own.dra && *path != own.registration);
    found
}

fn sockets_in(dir: Option<&Path>, ours: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let Some(entries) = dir.and_then(|dir| std::fs::read_dir(dir).ok()) else {
        return Vec::new();
    };
    entries
        .filter_map(Result::ok)
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_socket()))
        .filter(|entry| entry.file_name().to_str().is_some_and(&ours))
        .map(|entry| entry.path())
        .collect()
}

fn is_registration(name: &str, driver: &str) -> bool {
    let Some(stem) = name.strip_suffix("reg.sock") else {
        return false;
    };
    if stem.strip_prefix("dra@").is_some_and(|rest| rest.ends_with('-')) {
        return true;
    }
    let Some(rest) = stem.strip_prefix(driver) else {
        return false;
    };
    // `@` or `-`, then nothing, or an instance (which has no dot: another driver's name has) and `-`.
    let instance = rest.strip_prefix('@').or_else(|| rest.strip_prefix('-'));
    instance.is_some_and(|rest| !rest.contains('.') && (rest.is_empty() || rest.ends_with('-')))
}

fn is_endpoint(name: &str) -> bool {
    name == "dra.sock" || (name.starts_with("dra-") && name.ends_with(".sock"))
}

/// True if connecting is refused: the file is there and nobody listens.
async fn is_dead(path: &Path) -> bool {
    matches!(
        timeout(PROBE_LIMIT, UnixStream::connect(path)).await,
        Ok(Err(error)) if error.kind() == std::io::ErrorKind::ConnectionRefused
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::net::UnixListener;

    const UID: &str = "9b2f3c1e-6a7d-4f10-8a43-0d4f2f7c1b22";
    const DRIVER: &str = "gpu.nvidia.com";

    /// The `:authority` that grpc-go makes of a path: everything but unreserved characters,
    /// sub-delimiters and `:[]@` is percent-encoded.
    fn authority(path: &Path) -> String {
        let kept = |b: u8| b.is_ascii_alphanumeric() || b"-_.~!$&'()*+,;=:[]@".contains(&b);
        let path = path.to_str().unwrap();
        path.bytes().map(|b| if kept(b) { char::from(b).to_string() } else { format!("%{b:02X}") }).collect()
    }

    fn is_accepted(path: &Path) -> bool {
        http::uri::Authority::try_from(authority(path)).is_ok()
    }

    #[test]
    fn names_are_per_pod_or_fixed() {
        let root = Path::new("/var/lib/kubelet");
        let sockets = Sockets::place(root, DRIVER, Some(UID)).unwrap();
        assert_eq!(
            sockets.registration.to_str().unwrap(),
            format!("/var/lib/kubelet/plugins_registry/gpu.nvidia.com@{UID}-reg.sock")
        );
        assert_eq!(
            sockets.dra.to_str().unwrap(),
            format!("/var/lib/kubelet/plugins/gpu.nvidia.com/dra-{UID}.sock")
        );
        let fixed = Sockets::place(root, DRIVER, None).unwrap();
        assert!(fixed.registration.ends_with("plugins_registry/gpu.nvidia.com@reg.sock"));
        assert!(fixed.dra.ends_with("plugins/gpu.nvidia.com/dra.sock"));
    }

    #[test]
    fn every_length_gives_a_path_that_fits_and_an_authority_that_is_accepted() {
        let mut names = std::collections::BTreeSet::new();
        for length in 2..50 {
            let root = PathBuf::from(format!("/{}", "k".repeat(length - 1)));
            for driver in [DRIVER.to_owned(), format!("{}.example", "d".repeat(54))] {
                for uid in [None, Some(UID)] {
                    let Ok(sockets) = Sockets::place(&root, &driver, uid) else { continue };
                    for path in [&sockets.dra, &sockets.registration] {
                        assert!(path.as_os_str().len() <= MAX_PATH, "{path:?}");
                    }
                    assert!(is_accepted(&sockets.registration), "{:?}", sockets.registration);
                    let name = sockets.registration.file_name().unwrap().to_str().unwrap().to_owned();
                    assert!(is_registration(&name, &driver), "{name} would never be swept");
                    names.insert(name);
                }
            }
        }
        assert_eq!(names.len(), 8 - 2, "each fallback was reached: {names:#?}");
    }

    #[test]
    fn a_name_without_the_at_sign_is_refused_as_an_authority() {
        let path = format!("/var/lib/kubelet/plugins_registry/{DRIVER}-{UID}-reg.sock");
        assert!(!is_accepted(Path::new(&path)), "the @ would no longer be needed: simplify the names");
    }

    #[test]
    fn a_root_too_deep_is_refused_with_words() {
        let root = PathBuf::from(format!("/{}", "k".repeat(90)));
        let error = Sockets::place(&root, DRIVER, Some(UID)).unwrap_err();
        assert!(error.to_string().contains("107 bytes"), "{error}");
    }

    #[test]
    fn a_relative_root_and_a_uid_with_a_slash_are_refused() {
        assert!(matches!(Sockets::place(Path::new("kubelet"), DRIVER, None), Err(Error::KubeletDir(_))));
        for uid in ["", "../../etc", "a b"] {
            assert!(
                matches!(Sockets::place(Path::new("/k"), DRIVER, Some(uid)), Err(Error::PodUid(_))),
                "{uid:?}"
            );
        }
    }

    #[test]
    fn only_this_drivers_names_are_swept() {
        for ours in ["@reg.sock", "-reg.sock", "@1234-reg.sock", "-1234-ab-reg.sock"] {
            assert!(is_registration(&format!("{DRIVER}{ours}"), DRIVER), "{ours}");
        }
        for other in [
            "gpu.nvidia.com.example.org-reg.sock",
            "gpu.nvidia.com-x.example.org-reg.sock",
            "compute-domain.nvidia.com-reg.sock",
            "gpu.nvidia.com@1234.sock",
            "dra-driver-reg.sock",
        ] {
            assert!(!is_registration(other, DRIVER), "{other}");
        }
    }

    #[tokio::test]
    async fn the_sweep_takes_dead_sockets_and_leaves_the_living() {
        let root = tempfile::tempdir().unwrap();
        let own = Sockets::place(root.path(), DRIVER, Some(UID)).unwrap();
        let (registry, plugin) = (own.registration.parent().unwrap(), own.dra.parent().unwrap());
        std::fs::create_dir_all(registry).unwrap();
        std::fs::create_dir_all(plugin).unwrap();
        let dead = [
            registry.join("gpu.nvidia.com@dead-reg.sock"),
            registry.join("gpu.nvidia.com-dead-reg.sock"),
            plugin.join("dra-dead.sock"),
        ];
        for path in dead.iter().chain([&own.dra]) {
            drop(UnixListener::bind(path).unwrap());
        }
        let alive = registry.join("gpu.nvidia.com@alive-reg.sock");
        let _listener = UnixListener::bind(&alive).unwrap();
        let other = registry.join("compute-domain.nvidia.com-reg.sock");
        drop(UnixListener::bind(&other).unwrap());
        let file = plugin.join("dra-file.sock");
        std::fs::write(&file, "no socket").unwrap();

        let mut removed = sweep(&own, DRIVER, Duration::ZERO).await;
        removed.sort();
        let mut expected = dead.to_vec();
        expected.sort();
        assert_eq!(removed, expected);
        for path in [&alive, &other, &file, &own.dra] {
            assert!(path.exists(), "{path:?} was to stay");
        }
    }
}
