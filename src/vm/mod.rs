//! `pilot-agent vm`: a virtual machine's part in the mesh, without bash and sudo.
//!
//! [`envfile`] reads `sidecar.env` and `cluster.env`, [`plan`] derives from them what Istio's `istio-start.sh` does:
//! the environment, the command line, the user, the rules; both are pure. [`rights`] asks the kernel as that user. [`install`] puts the files of
//! `istioctl x workload entry configure` in their places ([`places`]), lines of `/etc/hosts` among them ([`hosts`]), and the folders
//! for them ([`folders`]); [`links`] keeps all of it inside the root. [`check`] looks at a machine and gives a line for each thing.
//! The command itself (`cli/vm.rs`) applies the rules and executes the agent under its user.
//!
//! Promises: the files are read as text, nothing in them is executed; all faults are reported together, before anything
//! is changed; a file is replaced whole or not at all, and never without having asked; the agent keeps the process id
//! that systemd knows. Istio's own script goes on working beside it.
//! `shlex` splits the lines by the shell's quoting; what only a shell can compute is refused with its line.
//! Uses `istiod` (claims of a token) and `tls` (dates of a certificate).

pub(crate) mod accounts;
pub(crate) mod check;
pub(crate) mod envfile;
pub(crate) mod folders;
mod hosts;
pub(crate) mod install;
pub(crate) mod links;
pub(crate) mod places;
pub(crate) mod plan;
pub(crate) mod rights;
#[cfg(test)]
pub(crate) mod variables;
