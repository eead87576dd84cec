//! (room ledger)
