//! (room params)
