//! Starting a daemon. The supervisor starts this program again ([`start`]); the child leaves the pod's
//! control group, takes mounts of its own, and becomes `nvidia-cuda-mps-control -d` ([`Launch::enter`]),
//! which goes into the background and outlives the supervisor.

use std::fs;
use std::io;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::unistd::{chdir, chroot};
use serde::{Deserialize, Serialize};
use tokio::process::Command;
use tokio::time::timeout;

use super::{DaemonError, DaemonMounts, Folder, PROGRAM, Program, cgroup, files};
use crate::model::names::DeviceUuid;

/// The daemon is in the background after milliseconds.
const LIMIT: Duration = Duration::from_secs(5);
/// The subcommand that calls [`Launch::enter`].
pub const SUBCOMMAND: &str = "mps-launch";
const SHM: &str = "dev/shm";
/// Where a daemon in another root has its folder.
const FOLDER_IN_ROOT: &str = "tmp";

/// All that the child needs to know. JSON, its one argument.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Launch {
    pub folder: PathBuf,
    /// The JSON name is that of earlier versions.
    #[serde(rename = "housing")]
    pub mounts: DaemonMounts,
    pub program: Program,
    /// In the order in which clients are to number them.
    pub devices: Vec<DeviceUuid>,
    /// Ask for one server for all users.
    pub multi_user: bool,
    pub cgroup_root: PathBuf,
}

/// Runs `launcher mps-launch LAUNCH` to its end, which is when the daemon is in the background.
/// Returns what it had to say.
pub async fn start(launcher: &Path, launch: &Launch) -> Result<String, DaemonError> {
    let start = |source| DaemonError::Start { path: launcher.to_owned(), source };
    let words = serde_json::to_string(launch).map_err(|error| start(error.into()))?;
    let child = Command::new(launcher)
        .args([SUBCOMMAND, &words])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(start)?;
    let Ok(output) = timeout(LIMIT, child.wait_with_output()).await else {
        let words = format!("{PROGRAM} did not go into the background within {} s", LIMIT.as_secs());
        return Err(DaemonError::Launch { words });
    };
    let output = output.map_err(start)?;
    let said: String =
        [output.stdout, output.stderr].iter().map(|bytes| String::from_utf8_lossy(bytes)).collect();
    let said = said.split_whitespace().collect::<Vec<_>>().join(" ");
    match output.status.success() {
        true => Ok(said),
        false => Err(DaemonError::Launch { words: format!("{said} ({})", output.status) }),
    }
}

/// True if the program can serve all users with one server (`-M`); older ones would take the flag for a
/// question. Told by its texts, as it does not tell itself.
pub fn knows_multi_user(program: &Path) -> bool {
    const NAMES: [&[u8]; 2] = [b"multiuser-server", b"multi-user"];
    let Ok(bytes) = fs::read(program) else { return false };
    NAMES.iter().any(|name| bytes.windows(name.len()).any(|part| part == *name))
}

impl Launch {
    /// Leaves the control group of this container. What could not be done, in words.
    pub fn leave_cgroups(&self) -> Vec<String> {
        cgroup::leave(&self.cgroup_root)
    }

    /// Becomes the daemon. Returns only if that failed.
    pub fn enter(&self) -> DaemonError {
        let view = match self.mounts {
            DaemonMounts::None => Ok(self.without_mounts()),
            DaemonMounts::Own => self.with_own_mounts(),
        };
        match view {
            Ok(view) => DaemonError::Start { path: view.program.clone(), source: self.exec(&view) },
            Err(error) => error,
        }
    }

    fn exec(&self, view: &DaemonView) -> io::Error {
        let devices: Vec<&str> = self.devices.iter().map(DeviceUuid::as_str).collect();
        let mut command = std::process::Command::new(&view.program);
        // Nothing else of the environment: a limit variable would be a second default beside the one that
        // is set and read back.
        command.env_clear().envs(view.environment.iter().map(|(name, value)| (name, value)));
        command
            .env("CUDA_VISIBLE_DEVICES", devices.join(","))
            .env("CUDA_MPS_PIPE_DIRECTORY", view.folder.pipe())
            .env("CUDA_MPS_LOG_DIRECTORY", view.folder.log())
            .arg("-d");
        if self.multi_user {
            command.arg("-M");
        }
        command.exec()
    }

    /// Without another root: the program as it is, told where the driver's libraries and programs are.
    fn without_mounts(&self) -> DaemonView {
        let environment = vec![
            ("LD_LIBRARY_PATH", joined(&self.program.libraries)),
            ("PATH", joined(&self.program.programs)),
        ];
        DaemonView { folder: Folder::new(&self.folder), program: self.program.path.clone(), environment }
    }

    /// Takes mounts of its own: the folder's memory as /dev/shm, and the driver's root as `/`, if it is one.
    fn with_own_mounts(&self) -> Result<DaemonView, DaemonError> {
        unshare(CloneFlags::CLONE_NEWNS)
            .map_err(|errno| files("take a mount namespace for", &self.folder)(errno.into()))?;
        // What is mounted here stays here; what the node unmounts goes here, too.
        remount(MsFlags::MS_REC | MsFlags::MS_SLAVE)?;
        let folder = Folder::new(&self.folder);
        let Some(root) = &self.program.root else {
            bind(&folder.shm(), &Path::new("/").join(SHM))?;
            return Ok(self.without_mounts());
        };
        for (name, probe) in [("dev", "dev/null"), ("proc", "proc/self")] {
            if !root.join(probe).exists() {
                bind(&Path::new("/").join(name), &root.join(name))?;
            }
        }
        bind(&folder.shm(), &root.join(SHM))?;
        bind(folder.path(), &root.join(FOLDER_IN_ROOT))?;
        self.change_root(root)
    }

    fn change_root(&self, root: &Path) -> Result<DaemonView, DaemonError> {
        let inside = self.program.path.strip_prefix(root).unwrap_or(&self.program.path);
        let program = Path::new("/").join(inside);
        chroot(root).and_then(|()| chdir("/")).map_err(|errno| files("change into", root)(errno.into()))?;
        let path = "/usr/bin:/usr/sbin:/bin:/sbin:/usr/local/bin:/usr/lib/nvidia/current".to_owned();
        let folder = Folder::new(Path::new("/").join(FOLDER_IN_ROOT));
        Ok(DaemonView { folder, program, environment: vec![("PATH", path)] })
    }
}

/// The daemon's environment, with paths as the daemon sees them.
struct DaemonView {
    folder: Folder,
    program: PathBuf,
    environment: Vec<(&'static str, String)>,
}

fn remount(flags: MsFlags) -> Result<(), DaemonError> {
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>)
        .map_err(|errno| files("change the propagation of", Path::new("/"))(errno.into()))
}

fn bind(from: &Path, to: &Path) -> Result<(), DaemonError> {
    mount(Some(from), to, None::<&str>, MsFlags::MS_BIND | MsFlags::MS_REC, None::<&str>)
        .map_err(|errno| files("mount the daemon's own folders on", to)(errno.into()))
}

fn joined(paths: &[PathBuf]) -> String {
    paths.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_server_for_all_is_asked_of_programs_that_know_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(PROGRAM);
        assert!(!knows_multi_user(&path));
        fs::write(&path, b"\0-d\0allows multiple CUDA processes\0").unwrap();
        assert!(!knows_multi_user(&path));
        fs::write(&path, b"\0-d\0-multiuser-server\0").unwrap();
        assert!(knows_multi_user(&path));
    }

    #[test]
    fn a_launch_survives_its_way_to_the_child() {
        let launch = Launch {
            folder: "/run/tranche/mps/GPU-1".into(),
            mounts: DaemonMounts::Own,
            program: Program {
                path: "/driver-root/usr/bin/nvidia-cuda-mps-control".into(),
                root: Some("/driver-root".into()),
                libraries: vec!["/driver-root/usr/lib64".into()],
                programs: vec![],
            },
            devices: vec!["GPU-1".into()],
            multi_user: false,
            cgroup_root: "/sys/fs/cgroup".into(),
        };
        let text = serde_json::to_string(&launch).unwrap();
        assert_eq!(serde_json::from_str::<Launch>(&text).unwrap(), launch);
        assert!(text.contains(r#""housing":"Mounted""#), "{text}");
    }
}
