//! `istio-iptables`: redirects a pod's or VM's traffic to Envoy.
//!
//! [`settings`] holds what the user asked for and derives checked [`options`]; [`rules`] turns them into
//! a list of [`model::Rule`]s, purely; [`restore`] prints them for `iptables-restore`, [`nft`] for `nft`.
//! [`state`] reads what the kernel holds, [`verify`] compares, [`change`] and [`undo`] make the documents
//! that get from one to the other. What touches the kernel is thin: [`detect`], [`apply`], [`native`] behind
//! [`run::Runner`] ([`exec`] is one program's run), [`net`] over netlink, [`probe`] for the validation. [`command`] is the whole of it,
//! with signals held back ([`hold`]) while rules change.
//!
//! Promises: per address family the old rules or the new ones, never none; a second apply changes
//! nothing; an apply followed by a clean-up with its flags leaves nothing; a bad value is one line and
//! changes nothing.
//! Uses `base` only.

pub mod apply;
pub mod change;
pub mod command;
pub mod detect;
pub mod dry;
pub mod error;
pub mod exec;
pub mod hold;
pub mod interfaces;
pub mod look;
pub mod model;
pub mod native;
pub mod net;
pub mod nft;
pub mod options;
pub mod probe;
pub mod restore;
pub mod rules;
pub mod run;
pub mod settings;
pub mod show;
pub mod state;
pub mod undo;
pub mod verify;
