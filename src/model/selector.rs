//! Which GPUs an administrator means.

use std::fmt;
use std::str::FromStr;

use super::gpu::Gpu;
use super::names::DeviceUuid;

/// Boards by what an administrator knows of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GpuSelector {
    All,
    Minor(u32),
    Uuid(DeviceUuid),
    /// A part of the product's name, in any case.
    Product(String),
}

impl GpuSelector {
    pub fn matches(&self, gpu: &Gpu) -> bool {
        match self {
            Self::All => true,
            Self::Minor(minor) => gpu.minor == *minor,
            Self::Uuid(uuid) => gpu.uuid == *uuid,
            Self::Product(part) => gpu.product_name.to_lowercase().contains(&part.to_lowercase()),
        }
    }
}

impl FromStr for GpuSelector {
    type Err = String;

    /// `all`, a number, a UUID, or a part of the product's name.
    fn from_str(text: &str) -> Result<Self, String> {
        let text = text.trim();
        match text {
            "" => Err("is empty; write all, a minor number, a GPU's UUID or a part of its name".to_owned()),
            "all" | "*" => Ok(Self::All),
            _ if text.starts_with("GPU-") => Ok(Self::Uuid(DeviceUuid::new(text))),
            _ => Ok(text.parse().map_or_else(|_| Self::Product(text.to_owned()), Self::Minor)),
        }
    }
}

impl fmt::Display for GpuSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Minor(minor) => write!(f, "{minor}"),
            Self::Uuid(uuid) => uuid.fmt(f),
            Self::Product(part) => f.write_str(part),
        }
    }
}
