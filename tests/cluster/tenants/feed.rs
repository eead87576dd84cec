//! Objects that cannot be read, or are as fat as the API server admits: they cost whoever wrote them.
