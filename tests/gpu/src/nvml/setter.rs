//! The only code in this program that changes a card. It takes a [`ModePermission`], which a run has only
//! with `--may-set-compute-mode`.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int, c_uint};
use std::rc::Rc;

use anyhow::{Context, Result, anyhow};

use super::{Device, Mode, Nvml, call};
use crate::args::ModePermission;

pub struct ModeSetter {
    nvml: Rc<Nvml>,
}

impl ModeSetter {
    pub fn new(nvml: Rc<Nvml>, _permission: ModePermission) -> Self {
        Self { nvml }
    }

    pub fn mode(&self, uuid: &str) -> Result<Mode> {
        self.nvml.mode(uuid)
    }

    pub fn set_mode(&self, uuid: &str, mode: Mode) -> Result<()> {
        let device = self.nvml.device(uuid)?;
        // SAFETY: numbers, as declared.
        unsafe { call!(self.nvml, c"nvmlDeviceSetComputeMode", device => Device, mode.number() => c_uint) }
            .with_context(|| format!("set compute mode {mode}"))
    }
}
