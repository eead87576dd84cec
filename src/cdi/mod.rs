//! (room cdi)
