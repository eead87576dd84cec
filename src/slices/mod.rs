//! (room slices)
