//! (room cluster)
