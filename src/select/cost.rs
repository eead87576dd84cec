//! What an evaluation may cost, and what it has cost so far.
//!
//! The unit is the API server's (KEP-4381, CEL's cost model: an access or a call is 1, a byte of text that is read
//! a tenth); a tick is a tenth of it. Two things are dearer here than there, because they cost more than the API server
//! counts: comparing lists within lists, and patterns with repetitions that are counted. What the API server counts as
//! nothing (a literal, `&&`) is a fifth of a unit. So the limit is twice the API server's. What one function costs stands
//! in `function.rs`.

use super::eval::Trouble;

/// Of one evaluation on one device, in units: twice the API server's limit.
pub const COST_MAX: u64 = 2_000_000;
pub const TICKS_PER_UNIT: u64 = 10;
/// What one evaluation may take of memory, all in all. At the API server's limit texts of 10 MB can be made.
pub const MEMORY_MIB_MAX: usize = 64;

/// A literal, or an operator that only decides what is evaluated.
pub(super) const LIGHT: u64 = 2;
/// An access, a call, an element of a fold.
pub(super) const STEP: u64 = TICKS_PER_UNIT;
/// An element that is put into a list.
const ELEMENT: u64 = 8;
/// A failure that another part of the expression outweighs: its words were made for nothing.
pub(super) const FAILURE: u64 = 50;
/// At least as large as a value is.
const ELEMENT_BYTES: usize = 32;

/// What one evaluation has cost.
#[derive(Debug)]
pub(super) struct Meter {
    ticks: u64,
    /// It may have.
    most: u64,
    bytes: usize,
}

impl Default for Meter {
    fn default() -> Self {
        Self::within(u64::MAX)
    }
}

impl Meter {
    /// So many ticks, and never more than [`COST_MAX`].
    pub fn within(ticks: u64) -> Self {
        Self { ticks: 0, most: ticks.min(COST_MAX * TICKS_PER_UNIT), bytes: 0 }
    }

    pub fn ticks(&self) -> u64 {
        self.ticks
    }

    pub fn pay(&mut self, ticks: u64) -> Result<(), Trouble> {
        self.ticks = self.ticks.saturating_add(ticks);
        if self.ticks > self.most { Err(Trouble::Costs) } else { Ok(()) }
    }

    /// So many bytes of text are read.
    pub fn read(&mut self, bytes: usize) -> Result<(), Trouble> {
        self.pay(bytes as u64)
    }

    /// A text of so many bytes is made.
    pub fn text(&mut self, bytes: usize) -> Result<(), Trouble> {
        self.read(bytes)?;
        self.hold(bytes)
    }

    /// A list of so many values is made.
    pub fn list(&mut self, length: usize) -> Result<(), Trouble> {
        self.pay(ELEMENT.saturating_mul(length as u64))?;
        self.hold(length.saturating_mul(ELEMENT_BYTES))
    }

    fn hold(&mut self, bytes: usize) -> Result<(), Trouble> {
        self.bytes = self.bytes.saturating_add(bytes);
        if self.bytes > MEMORY_MIB_MAX << 20 { Err(Trouble::Swells) } else { Ok(()) }
    }
}
