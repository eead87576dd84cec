//! What every group works with: the driver's program, the GPUs, metrics, timing.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::time::{Instant, sleep};
use tracing::{info, warn};

use super::config::{MpsSettings, Timing};
use super::group::GroupError;
use super::metrics::MpsMetrics;
use super::record::Records;
use crate::daemon::{self, DaemonError, DaemonMounts, Folder, PROGRAM, Process, Program, launch};
use crate::host::driver_root::{self, RootView};
use crate::host::durable;
use crate::model::share::MpsGroup;

/// From the start of a daemon to its first answer; seen: 5 ms.
const UP_LIMIT: Duration = Duration::from_secs(5);
const UP_POLL: Duration = Duration::from_millis(2);

/// Shared by all groups.
pub struct Tools<B> {
    settings: MpsSettings,
    pub records: Records,
    pub boards: B,
    pub metrics: MpsMetrics,
    /// The program takes `-M` by its texts, but did not come up with it.
    single_user_only: AtomicBool,
}

impl<B> Tools<B> {
    pub fn new(settings: MpsSettings, boards: B, metrics: MpsMetrics) -> Self {
        let records = Records::new(&settings.folder);
        Self { settings, records, boards, metrics, single_user_only: AtomicBool::new(false) }
    }

    pub fn timing(&self) -> Timing {
        self.settings.timing
    }

    pub fn folder(&self, group: &MpsGroup) -> Folder {
        Folder::new(self.settings.folder.join(group.folder()))
    }

    /// Folders of claims' own daemons, by name and place.
    pub fn folders_of_claims(&self) -> io::Result<Vec<(String, Folder)>> {
        let names = durable::names(&self.settings.folder)?;
        let of_claims = names.into_iter().filter(|name| MpsGroup::is_folder_of_claim(name));
        Ok(of_claims.map(|name| (name.clone(), Folder::new(self.settings.folder.join(name)))).collect())
    }

    /// True if daemons have file systems of their own.
    pub fn has_mounts(&self) -> bool {
        self.settings.mounts == DaemonMounts::Own
    }

    pub fn make(&self, folder: &Folder) -> Result<(), DaemonError> {
        folder.make(self.settings.mounts, self.settings.shm)
    }

    /// Looked up each time: a driver container may come, go and be replaced.
    pub fn program(&self) -> Result<Program, GroupError> {
        let root = self.settings.driver.root();
        let view = RootView::new(root, "");
        let path = match &self.settings.control {
            Some(path) if path.is_file() => path.clone(),
            Some(path) => return Err(GroupError::NoProgram { path: path.clone() }),
            None => driver_root::program(&view, PROGRAM)
                .map(|below| root.join(below))
                .ok_or_else(|| GroupError::NoDriver { root: root.to_owned() })?,
        };
        let is_other_root =
            root != Path::new("/") && path.starts_with(root) && driver_root::has_loader(&view);
        let (libraries, mut programs) = driver_root::search_paths(&self.settings.driver);
        // The server usually lies beside its control program.
        programs.splice(0..0, path.parent().map(PathBuf::from));
        Ok(Program { path, root: is_other_root.then(|| root.to_owned()), libraries, programs })
    }

    pub async fn ask(&self, folder: &Folder, commands: &[String]) -> Result<String, GroupError> {
        Ok(daemon::ask(&self.program()?.path, folder, commands).await?)
    }

    pub async fn tell(&self, folder: &Folder, command: &str) -> Result<(), GroupError> {
        Ok(daemon::tell(&self.program()?.path, folder, command).await?)
    }

    /// Starts a daemon and waits until it answers.
    pub async fn launch(&self, group: &MpsGroup, folder: &Folder) -> Result<Process, GroupError> {
        self.make(folder)?;
        let program = self.program()?;
        let knows = launch::knows_multi_user(&program.path);
        if knows && !self.single_user_only.load(Ordering::Relaxed) {
            match self.launch_as(group, folder, program.clone(), true).await {
                Ok(process) => return Ok(process),
                Err(error) => {
                    warn!(%group, %error, "no MPS daemon with one server for all users; trying without")
                }
            }
            let process = self.launch_as(group, folder, program, false).await?;
            self.single_user_only.store(true, Ordering::Relaxed);
            return Ok(process);
        }
        self.launch_as(group, folder, program, false).await
    }

    async fn launch_as(
        &self,
        group: &MpsGroup,
        folder: &Folder,
        program: Program,
        multi_user: bool,
    ) -> Result<Process, GroupError> {
        let path = program.path.clone();
        let order = launch::Launch {
            folder: folder.path().to_owned(),
            mounts: self.settings.mounts,
            program,
            devices: group.devices().to_vec(),
            multi_user,
            cgroup_root: self.settings.cgroup_root.clone(),
        };
        let said = launch::start(&self.settings.launcher, &order).await?;
        if !said.is_empty() {
            info!(%group, said, "starting an MPS daemon");
        }
        let process = up(&path, folder).await.map_err(|last| match last {
            Some(error) => GroupError::NotUp { said, source: error },
            None => GroupError::Daemon(DaemonError::Launch { words: said }),
        })?;
        info!(%group, pid = process.pid, program = %path.display(), "MPS daemon started");
        Ok(process)
    }
}

/// Waits until a daemon answers that has written its number. The last error, if it asked at all.
async fn up(program: &Path, folder: &Folder) -> Result<Process, Option<DaemonError>> {
    let deadline = Instant::now() + UP_LIMIT;
    let mut last = None;
    while Instant::now() < deadline {
        if let Some(process) = Process::daemon_of(folder) {
            match daemon::ask(program, folder, &[]).await {
                Ok(_) => return Ok(process),
                Err(error) => last = Some(error),
            }
        }
        sleep(UP_POLL).await;
    }
    Err(last)
}
