//! The taints of GPUs, each set once, and which of them a want's tolerations bear.

use crate::select::{Taint, Toleration, untolerated};

/// So many sets are kept before those that no GPU has any more are forgotten.
const SETS_MIN: usize = 64;

/// Sets of taints by number; 0: no taints.
#[derive(Debug, Clone)]
pub(super) struct Taints {
    all: Vec<Vec<Taint>>,
    /// Grows when the numbers are given anew.
    epoch: u64,
    most: usize,
}

impl Default for Taints {
    fn default() -> Self {
        Self { all: vec![Vec::new()], epoch: 0, most: SETS_MIN }
    }
}

impl Taints {
    pub fn number(&mut self, taints: &[Taint]) -> u32 {
        let at = self.all.iter().position(|known| known == taints).unwrap_or_else(|| {
            self.all.push(taints.to_vec());
            self.all.len() - 1
        });
        // There are hardly more sets than GPUs.
        at as u32
    }

    pub fn get(&self, number: u32) -> &[Taint] {
        self.all.get(number as usize).map_or(&[], Vec::as_slice)
    }

    /// Worth to be told apart from an earlier look: sets have been added, or numbers given anew.
    pub fn state(&self) -> (u64, usize) {
        (self.epoch, self.all.len())
    }

    pub fn crowded(&self) -> bool {
        self.all.len() > self.most
    }

    /// Forgets all but what these numbers stand for, and gives them new ones.
    pub fn renumber<'a>(&mut self, numbers: impl Iterator<Item = &'a mut u32>) {
        let old = std::mem::replace(&mut self.all, vec![Vec::new()]);
        self.epoch += 1;
        for number in numbers {
            *number = self.number(&old[*number as usize]);
        }
        self.most = SETS_MIN.max(4 * self.all.len());
    }

    /// By number: does who has these tolerations bear all taints of the set?
    pub fn borne(&self, tolerations: &[Toleration]) -> Vec<bool> {
        self.all.iter().map(|taints| untolerated(taints, tolerations).is_none()).collect()
    }
}
