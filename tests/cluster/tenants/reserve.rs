//! Demands that nobody can meet: they keep no room from others for longer than a while.
