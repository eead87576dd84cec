//! (room ops)
