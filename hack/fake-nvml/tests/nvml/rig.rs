//! A node in a temporary directory and a copy of the library that tells of it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU32, Ordering};

use nvml_wrapper::Nvml;
use nvml_wrapper_sys::bindings::NvmlLib;

pub struct Rig {
    pub dir: PathBuf,
}

/// The library as cargo has just built it.
pub fn built() -> PathBuf {
    let exe = std::env::current_exe().expect("own path");
    let deps = exe.parent().expect("a directory");
    let candidates = [deps.join("libfake_nvml.so"), deps.join("../libfake_nvml.so")];
    candidates.into_iter().find(|p| p.exists()).expect("the library is built with the tests")
}

impl Rig {
    pub fn new(control: &str) -> Rig {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let dir = std::env::temp_dir().join(format!("fake-nvml-test-{}-{number}", std::process::id()));
        fs::create_dir_all(&dir).expect("a temporary directory");
        let rig = Rig { dir };
        fs::copy(built(), rig.library()).expect("a copy of the library");
        rig.control(control);
        rig
    }

    pub fn library(&self) -> PathBuf {
        self.dir.join("libnvidia-ml.so.1")
    }

    /// Replaces the control file as a whole.
    pub fn control(&self, text: &str) {
        let new = self.dir.join("new");
        fs::write(&new, text).expect("written");
        fs::rename(&new, self.dir.join("control.json")).expect("replaced");
    }

    pub fn nvml(&self) -> Nvml {
        load(&self.library()).expect("initialised")
    }

    /// The bare functions of the same library.
    pub fn sys(&self) -> NvmlLib {
        // SAFETY: our own library, whose constructors do nothing.
        unsafe { NvmlLib::new(self.library()) }.expect("loaded")
    }

    pub fn cli(&self, words: &[&str]) {
        let status =
            Command::new(env!("CARGO_BIN_EXE_fake-nvml")).arg("--dir").arg(&self.dir).args(words).status();
        assert!(status.expect("started").success(), "fake-nvml {words:?}");
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.dir);
    }
}

pub fn load(library: &Path) -> Result<Nvml, nvml_wrapper::error::NvmlError> {
    Nvml::builder().lib_path(library.as_os_str()).init()
}
