//! Selectors that cost more than they may: their claims wait, and nobody else does.
