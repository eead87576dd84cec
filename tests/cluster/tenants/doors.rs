//! The webhook, health, metrics and state: who may speak to them, and what it costs to shout.
