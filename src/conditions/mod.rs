//! Outcomes in the words of status conditions and events. Pure. Empty so far: the node's outcomes are told
//! in kubelet's answers.
//!
//! May import: model, params, prepare. May name: k8s-openapi (as data only).
