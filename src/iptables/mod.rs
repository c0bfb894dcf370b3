//! `istio-iptables`: redirects a pod's or VM's traffic to Envoy.
//!
//! [`settings`] holds what the user asked for and derives checked [`options`]; [`rules`] turns them into
//! a list of [`model::Rule`]s, purely; [`restore`] prints them for `iptables-restore`, [`nft`] for `nft`.
//! [`state`] reads what the kernel holds, [`verify`] compares, [`earlier`] tells what of it other settings made, [`change`]
//! and [`undo`] make the documents that get from one to the other. What touches the kernel is thin: [`detect`], [`apply`], [`native`] behind
//! [`run::Runner`] ([`exec`] is one program's run), [`net`] over netlink, [`probe`] for the validation. [`command`] is the whole of it,
//! with signals held back ([`hold`]) while rules change, and one run at a time in a namespace ([`alone`]).
//!
//! Promises: per address family the old rules or the new ones, never none; a second apply changes
//! nothing; an apply followed by a clean-up with its flags leaves nothing; a bad value is one line and
//! changes nothing.
//! Uses only what every part may use.

mod alone;
pub(crate) mod apply;
pub(crate) mod change;
pub(crate) mod command;
pub(crate) mod detect;
pub(crate) mod dry;
mod earlier;
pub(crate) mod error;
pub(crate) mod exec;
pub(crate) mod hold;
pub(crate) mod look;
pub(crate) mod model;
pub(crate) mod native;
pub(crate) mod net;
pub(crate) mod nft;
pub(crate) mod options;
pub(crate) mod probe;
mod program;
pub(crate) mod restore;
pub(crate) mod rules;
pub(crate) mod run;
pub(crate) mod settings;
pub(crate) mod show;
pub(crate) mod state;
pub(crate) mod undo;
pub(crate) mod verify;
