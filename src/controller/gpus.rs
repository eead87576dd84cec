//! GPUs that are to be looked at again, that two parties name, and that are held for good.

use std::collections::BTreeSet;

use crate::controller::view::GpuRef;

#[derive(Debug, Default)]
pub struct NotedGpus {
    changed: BTreeSet<GpuRef>,
    contested: BTreeSet<GpuRef>,
    pinned: BTreeSet<GpuRef>,
}

impl NotedGpus {
    /// Something has happened to the GPU.
    pub fn note(&mut self, gpus: impl IntoIterator<Item = GpuRef>) {
        self.changed.extend(gpus);
    }

    /// Those that something has happened to since this was last called.
    pub fn take_changed(&mut self) -> BTreeSet<GpuRef> {
        std::mem::take(&mut self.changed)
    }

    /// The GPU has shares of ours, and another claim names it. True if that is new.
    pub fn contest(&mut self, gpu: &GpuRef) -> bool {
        self.contested.insert(gpu.clone())
    }

    pub fn settle(&mut self, gpu: &GpuRef) {
        self.contested.remove(gpu);
    }

    /// GPUs that we use and somebody else names, too.
    pub fn contested(&self) -> &BTreeSet<GpuRef> {
        &self.contested
    }

    /// Whether the GPU is held whenever it is free, and never given back.
    pub fn set_pinned(&mut self, gpu: &GpuRef, pinned: bool) {
        match pinned {
            true => drop(self.pinned.insert(gpu.clone())),
            false => drop(self.pinned.remove(gpu)),
        }
    }

    /// GPUs that are never given back.
    pub fn pinned(&self) -> impl Iterator<Item = &GpuRef> {
        self.pinned.iter()
    }

    pub fn is_pinned(&self, gpu: &GpuRef) -> bool {
        self.pinned.contains(gpu)
    }
}
