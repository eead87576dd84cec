//! (room conditions)
