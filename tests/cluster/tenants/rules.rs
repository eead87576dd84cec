//! What a pod may not ask for beside its share, and what an annotation does not get.
