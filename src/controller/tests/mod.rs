//! The controller's pure half against a cluster in memory: an API server's rules, a scheduler that decides on old
//! news, a controller-manager, and a watch that lags, repeats itself and begins anew.

mod books;
mod bounds;
mod bounds_of_others;
mod budgets;
mod cluster;
mod early;
mod explain;
mod gates;
mod groups;
mod hostile;
mod keeping;
mod language;
mod mig;
mod moving;
mod neighbours;
mod opted_in;
mod own_classes;
mod own_daemons;
mod ports;
mod preempting;
mod preempting_fair;
mod preempting_limits;
mod preempting_told;
mod preempting_whole;
mod prices;
mod refusals;
mod room;
mod scenes;
mod told;
mod volumes;
mod walk;
mod whole;
