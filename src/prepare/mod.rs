//! (room prepare)
