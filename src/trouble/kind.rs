//! The closed list of what can be wrong, in causal order, with what to do about each.
//!
//! `docs/OPERATIONS.md` is made from this file. A name, once released, stays; a new kind goes where its
//! cause belongs.

use std::{fmt, io};

use rustix::io::Errno;

use crate::base::lane::NoThread;

/// What a trouble takes away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Severity {
    /// The proxy cannot become ready, or will lose its identity or configuration.
    Broken,
    /// It works, but something beside it does not.
    Degraded,
}

impl Severity {
    /// `broken` or `degraded`.
    #[must_use]
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Broken => "broken",
            Self::Degraded => "degraded",
        }
    }
}

/// For a file in whose place there is a folder.
const FOLDER: &str = "a folder is in the file's place, as a mount makes one for a file that is not there: remove it, and mount or write the file";
/// For a mounted certificate that is over.
const RENEW: &str =
    "whoever writes the certificate's files has to renew it; a new one is taken as soon as it is there";
/// For the key of what is kept.
const SEAL: &str =
    "give IDENTITY_PERSIST_KEY a file of 32 bytes or more that only the agent's user may read (mode 0600)";
/// For a file that anybody may read elsewhere.
const RIGHTS: &str = "give the agent's user the right to read the file and to enter its folders (user 1337 in a pod, istio-proxy on a VM)";

/// For a file that rights do not keep from being replaced.
const FIXED: &str = "the file or its folder is immutable (lsattr shows it, chattr -i takes it back), or the file is somebody else's in a \
                     folder with the sticky bit: rights do not mend that";

/// How a file is told of that never comes.
const SILENCE: &str = "disk does not answer within";
/// For one that links do not lead to.
const CIRCLE: &str = "the links of its path lead in a circle: mount or write the file itself";
/// For one whose content never comes.
const SILENT: &str = "look at the volume that it is on, and at what is in its place: a network file system whose server is away and a \
                      named pipe are waited for";

/// For an Envoy that cannot be executed, by what the system says.
const BINARY: [(&str, &str); 3] = [
    ("it is a directory", "binaryPath of the proxy config names a folder: write the path of Envoy itself"),
    (
        "no such file",
        "set binaryPath of the proxy config to Envoy's path; a script's interpreter or a program's loader may also be what is not there",
    ),
    (
        "permission denied",
        "make it executable for the agent's user, and mount its file system without noexec",
    ),
];

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident $severity:ident $summary:literal, $hint:literal;)*) => {
        /// What is wrong. The order is that of causes: what stands further up explains what stands below.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Kind {
            $(#[doc = $summary] $(#[$doc])* $name,)*
        }

        impl Kind {
            /// All of them, causes first.
            pub(crate) const ALL: &[Kind] = &[$(Kind::$name),*];

            /// Its stable name, as it stands in JSON.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self { $(Self::$name => stringify!($name),)* }
            }

            /// What it means, in one sentence.
            #[must_use]
            pub(crate) fn summary(self) -> &'static str {
                match self { $(Self::$name => $summary,)* }
            }

            /// What to do.
            #[must_use]
            pub(crate) fn hint(self) -> &'static str {
                match self { $(Self::$name => $hint,)* }
            }

            /// What it takes away.
            #[must_use]
            pub(crate) fn severity(self) -> Severity {
                match self { $(Self::$name => Severity::$severity,)* }
            }
        }
    };
}

kinds! {
    // The machine.
    DiskFull Broken
        "a file cannot be written because the disk, or the volume's quota, is full",
        "free space or raise the volume's size limit (emptyDir sizeLimit; of 'File too large': ulimit -f); the agent tries again by itself";
    DiskReadOnly Broken
        "a file cannot be written because the file system is read-only",
        "mount a writable volume at the path (an emptyDir for /etc/istio/proxy and /var/run/secrets)";
    SocketFolder Broken
        "a socket that Envoy needs cannot be made",
        "is the folder there, a folder, and writable for the agent's user (user 1337 in a pod, istio-proxy on a VM)? Is the path shorter than 108 bytes?";
    OpenFiles Broken
        "the limit of open files is reached",
        "raise the limit of open files (ulimit -n, LimitNOFILE= in the systemd unit)";
    Processes Broken
        "the limit of processes and threads is reached",
        "raise the limit (podPidsLimit of the kubelet, TasksMax= of the systemd unit, ulimit -u), or end what uses it up (of 'Operation not permitted': its seccomp profile must know clone3, as Docker's does since 20.10.10); the agent tries again by itself";
    ClockWrong Broken
        "this machine's clock is wrong",
        "set the clock (chronyc makestep, timedatectl set-ntp true); certificates and tokens are valid only between two dates";

    // What the agent and Envoy are started with.
    ConfigInvalid Broken
        "the configuration is refused",
        "repair the value named; pilot-agent doctor shows all of them at once";
    PartFailed Broken
        "a part of the agent failed",
        "report the line with the agent's version; the agent ends in order so that whoever started it starts it anew";
    EnvoyNotStarted Broken
        "Envoy cannot be started, or does not run",
        "is binaryPath of the proxy config the path of an Envoy for this processor, and may this user execute it?";
    BootstrapRejected Broken
        "Envoy refuses its bootstrap",
        "Envoy's own lines above name the field; pilot-agent proxy --dry-run shows the bootstrap and Envoy's verdict on it";
    PortTaken Broken
        "another process holds a port that the proxy needs",
        "stop the process named, or give the proxy another port (proxyAdminPort of the proxy config, DNS_PROXY_ADDR)";
    EnvoyCrashed Broken
        "Envoy ended by itself",
        "Envoy's last lines above say why; status 137 is the kernel's lack of memory, 139 and 134 are crashes to report with Envoy's version";

    // The token.
    TokenNotHad Broken
        "istiod asks for a token and what it comes from gives none",
        "nothing was sent to istiod: does what the token comes from (the metadata server, a token endpoint) answer this machine?";
    TokenMissing Broken
        "istiod asks for a token and there is no token file",
        "is the projected volume istio-token mounted (audience istio-ca)? On a VM: was the token copied to /var/run/secrets/tokens/istio-token?";
    TokenUnreadable Broken
        "istiod asks for a token and its file cannot be read",
        "give the agent's user the right to read it (fsGroup 1337 in a pod, chown istio-proxy on a VM)";
    TokenMalformed Broken
        "istiod asks for a token and its file holds none",
        "write a fresh token into the file (kubectl create token --audience istio-ca)";
    TokenExpired Broken
        "the token has expired",
        "does the kubelet, or whoever writes the token, still run? On a VM copy a fresh one; the agent takes it as soon as the file changes";
    TokenWrongAudience Broken
        "the token is for another audience than istiod's",
        "make the token for istiod's audience: istio-ca, or what TOKEN_AUDIENCES of istiod lists";

    // Trust anchors.
    RootMissing Broken
        "the file with istiod's root certificate is not there",
        "is the ConfigMap istio-ca-root-cert mounted at /var/run/secrets/istio (does it exist in this namespace)? Or name another file, or SYSTEM, by XDS_ROOT_CA and CA_ROOT_CA";
    RootBroken Broken
        "the file with istiod's root certificate holds no certificate that can be read",
        "write the mesh's root certificate into it, in PEM (kubectl get configmap istio-ca-root-cert -o jsonpath)";

    // The way to istiod.
    AddressInvalid Broken
        "istiod's address cannot be used",
        "write discoveryAddress, or CA_ADDR, as host:port with brackets around IPv6";
    NameNotResolved Broken
        "istiod's name is not resolved to an address",
        "does DNS answer on this machine, and is this the name of a running istiod? A VM outside the cluster's DNS needs it in /etc/hosts";
    ConnectionRefused Broken
        "istiod's port refuses connections",
        "is istiod running and ready, and does it listen on this port (kubectl -n istio-system get pods, endpoints istiod)?";
    ConnectionTimedOut Broken
        "packets to istiod are not answered",
        "look at network policies, firewalls and routes between this machine and istiod's port";
    ConnectionFailed Broken
        "istiod cannot be reached",
        "look at routes, interfaces and firewalls of this machine";
    ProxyRefused Broken
        "the HTTP proxy does not let the agent through to istiod",
        "set NO_PROXY for istiod if it is reached directly, else allow CONNECT to it";

    // TLS.
    RootDoesNotSign Broken
        "istiod's certificate is not signed by a root that this proxy trusts",
        "is the root file that of this istiod's mesh? After a change of the root copy the new one (istio-ca-root-cert) to every namespace and VM";
    ServerCertificateNotYetValid Broken
        "istiod's certificate is not valid yet by this machine's clock",
        "compare this machine's clock with istiod's; if both are right, wait or reissue istiod's certificate";
    ServerCertificateExpired Broken
        "istiod's certificate has expired by this machine's clock",
        "compare this machine's clock with istiod's; if both are right, restart or repair istiod so that it renews its certificate";
    ServerNameMismatch Broken
        "istiod's certificate is for another name",
        "use a name from the certificate in discoveryAddress, or set ISTIOD_SAN to one";
    ClientCertificateRefused Broken
        "istiod refuses the certificate with which this proxy shows who it is, or wants one",
        "look at cert-chain.pem and key.pem in the folder that PROV_CERT names: signed by this mesh, and in date? Without them the agent uses its token";
    TlsFailed Broken
        "the TLS handshake with istiod fails",
        "is this istiod's TLS port (15012; 15010 is plain text), and is nothing in between that ends TLS?";

    // What istiod says.
    IstiodSilent Broken
        "istiod accepts the connection and says nothing",
        "look at istiod's load and log, and at what stands between (a load balancer without a backend accepts and is silent; a path with a smaller MTU loses large packets)";
    IstiodCloses Broken
        "istiod ends the stream of configuration again and again",
        "look at istiod's log and restarts, and at idle limits of load balancers in between";
    CaUnreachable Broken
        "the CA, which is not istiod here, cannot be reached",
        "is its address right (VAULT_ADDR, CA_ADDR), does it run, and do name, route, firewall and roots on the way to it let the agent through?";
    CertificateRefused Broken
        "the CA does not sign this workload's certificate",
        "istiod's log names the reason (kubectl -n istio-system logs deploy/istiod | grep -i csr)";
    CertificateUnusable Broken
        "the CA signed something that cannot be used",
        "the CA's answer must begin with the certificate for the key that was sent, and end with the root";
    CertificateNotAnswered Broken
        "the CA does not answer",
        "look at load and log of the CA named (istiod mostly); CA_ADDR or VAULT_ADDR may name another one than the one that is healthy";
    AdsRefused Broken
        "istiod refuses this proxy's stream of configuration",
        "istiod's log names the reason (kubectl -n istio-system logs deploy/istiod | grep -i ads)";

    // Certificates of one's own.
    CertificateFiles Broken
        "certificate files cannot be used",
        "key and certificate must belong together, be PEM and be readable by the agent's user";
    OutputCertsFailed Degraded
        "certificates cannot be written to the folder of OUTPUT_CERTS, or of IDENTITY_PERSIST",
        "is the folder there and writable for the agent's user?";

    // What follows.
    IdentityNearExpiry Broken
        "this workload's certificate ends soon, and the proxy itself is why it is not renewed",
        "repair what stands above; IDENTITY_NEAR_EXPIRY says what becomes of the proxy meanwhile";
    CertificateNotYetValid Broken
        "this workload's certificate is not valid yet by this machine's clock",
        "compare the CA's clock with this machine's and set the one that is wrong; peers refuse the certificate until it is valid";
    CertificateChain Degraded
        "the chain of this workload's certificate is one that peers refuse",
        "repair the CA: its signing certificate (istiod: the secret cacerts) must be in date and signed by the root that it sends; the certificate is served as it is until the CA issues another";
    CertificateExpired Broken
        "this workload's certificate has expired and could not be renewed",
        "repair what stands above; connections of this workload are refused by its peers until then";
    CertificateMissing Broken
        "this workload has no certificate yet though Envoy asks for it",
        "repair what stands above; Envoy cannot serve mutual TLS without it";
    ConfigRejected Broken
        "Envoy rejects configuration that istiod sent",
        "the rejected resource keeps its last good version; repair the EnvoyFilter or the resource named, or use Istio's own build of Envoy";
    NoConfig Broken
        "Envoy has received no configuration",
        "is istiod reachable and does it know this proxy (istioctl proxy-status)?";
    NoListeners Broken
        "Envoy has received clusters but no listeners, or the reverse",
        "does istiod know this workload (istioctl proxy-config listeners), and does Envoy reject what it sends?";
    NameTableMissing Broken
        "istiod has not sent the table of DNS names yet",
        "is istiod reachable, and is DNS capture on there as well (ISTIO_META_DNS_CAPTURE)?";
    GrpcBootstrapMissing Broken
        "the bootstrap of proxyless gRPC, or a file it names, is not there",
        "is GRPC_XDS_BOOTSTRAP writable for the agent, and are the certificates it names issued?";
    EnvoyAdminSilent Broken
        "Envoy's admin port does not answer",
        "is Envoy starting, stuck or starved of CPU? Its admin port is proxyAdminPort of the proxy config (15000)";
    EnvoyNotInitialised Broken
        "Envoy runs but is not live",
        "INITIALIZING: it waits for clusters, listeners or certificates (pilot-agent request GET /init_dump names which); DRAINING: somebody asked for that (drain_listeners, healthcheck/fail)";
    Terminating Broken
        "the agent is shutting down",
        "nothing needs to be done; who asked for it stands in the log";

    // Beside the proxy.
    MemoryShort Degraded
        "memory is short, and connections of clients are closed until there is room",
        "find out which client has so many connections or streams, or raise the container's memory limit (or GOMEMLIMIT, where it is the smaller one); Envoy's own stay";
    ServingFromMemory Degraded
        "Envoy is given the last good configuration from the agent's memory, because istiod cannot be reached",
        "repair what stands above; changes of the mesh do not arrive until then (XDS_REPLAY)";
    ReplayNotWritten Degraded
        "the last good configuration cannot be written to disk",
        "is XDS_REPLAY_DIR writable for the agent's user, and is there space? The agent tries again by itself";
    ReplayTooLarge Degraded
        "the configuration is too large to be kept for an Envoy that restarts without istiod",
        "raise XDS_REPLAY_MAX_BYTES, or give the proxy less configuration (a Sidecar resource)";
    TokensNotExchanged Degraded
        "the security token service gets no tokens",
        "look at the endpoint named; whoever holds a token of it works on until that ends";
    GatewaySecret Degraded
        "a secret that a gateway's Envoy asks for is missing or cannot be served",
        "make or repair the secret named; what was served before stays in use, and Envoy waits for what never was there";
    CallerNotServed Degraded
        "a caller that brought its own token gets no certificate",
        "is the caller's token valid for the CA, and does the CA answer? Other callers and what is served already are not concerned";
    WasmFailed Degraded
        "a Wasm module could not be fetched or is no module",
        "look at the URL, the pull secret and the checksum of the WasmPlugin; the filter's failStrategy decides about traffic meanwhile";
    ApplicationUnhealthy Degraded
        "the application's health check fails",
        "look at the application; istiod takes this workload out of load balancing until it answers";
    DnsUpstreamFailed Degraded
        "no upstream DNS server answers",
        "look at the nameservers of /etc/resolv.conf; names of the mesh are answered all the same";
    StatusPortTaken Degraded
        "another process holds the status port",
        "stop the process named, or set statusPort of the proxy config (annotation status.sidecar.istio.io/port); the agent tries again by itself";
}

/// The system's error by its number in a text, as the library writes it.
fn numbered(said: &str) -> Option<Errno> {
    let number = said.split_once("(os error ")?.1.split_once(')')?.0.parse().ok()?;
    Errno::from_io_error(&io::Error::from_raw_os_error(number))
}

impl Kind {
    /// The kind of that name.
    #[must_use]
    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|kind| kind.name() == name)
    }

    /// What to do where the detail holds the system's word: rights do not mend a folder, nor does a new file mend rights.
    #[must_use]
    pub(crate) fn hint_for(self, detail: &str) -> &'static str {
        if self == Self::EnvoyNotStarted {
            let found = BINARY.iter().find(|(word, _)| detail.to_ascii_lowercase().contains(word));
            return found.map_or(self.hint(), |(_, hint)| hint);
        }
        if self == Self::CertificateFiles && detail.contains(" expired ") {
            return RENEW;
        }
        if self == Self::OutputCertsFailed && detail.contains("(IDENTITY_PERSIST_KEY)") {
            return SEAL;
        }
        if matches!(self, Self::SocketFolder | Self::OutputCertsFailed)
            && numbered(detail) == Some(Errno::PERM)
        {
            return FIXED;
        }
        if !matches!(self, Self::TokenUnreadable | Self::RootMissing | Self::RootBroken) {
            return self.hint();
        }
        match numbered(detail) {
            None if detail.contains(SILENCE) => SILENT,
            Some(Errno::ISDIR) => FOLDER,
            Some(Errno::LOOP) => CIRCLE,
            Some(Errno::ACCESS | Errno::PERM) if self != Self::TokenUnreadable => RIGHTS,
            _ => self.hint(),
        }
    }

    /// Whether it is this proxy's own: another one, or this one started anew elsewhere, need not have it. What tokens come
    /// from is everybody's.
    #[must_use]
    pub(crate) fn is_own(self) -> bool {
        (self <= Self::RootBroken && self != Self::TokenNotHad)
            || matches!(
                self,
                Self::ClientCertificateRefused
                    | Self::CertificateRefused
                    | Self::CertificateUnusable
                    | Self::CertificateFiles
            )
    }

    /// Whether it is the token's.
    #[must_use]
    pub(crate) fn is_token(self) -> bool {
        (Self::TokenMissing..=Self::TokenWrongAudience).contains(&self)
    }

    /// Whether nobody at the other end has said anything of this proxy yet.
    #[must_use]
    pub(crate) fn is_way(self) -> bool {
        (Self::AddressInvalid..=Self::IstiodSilent).contains(&self) && self != Self::ClientCertificateRefused
    }

    /// Whether it is on the way to istiod, or istiod's, or that of what tokens come from, without which istiod is not asked.
    #[must_use]
    pub(crate) fn is_upstream(self) -> bool {
        (Self::AddressInvalid..=Self::AdsRefused).contains(&self) || self == Self::TokenNotHad
    }

    /// What the input or output error behind this error is, where it has a kind of its own.
    #[must_use]
    pub(crate) fn of_chain(error: &(dyn std::error::Error + 'static)) -> Option<Self> {
        let mut next = Some(error);
        while let Some(error) = next {
            if let Some(io) = error.downcast_ref::<io::Error>() {
                return Self::of_io(io);
            }
            next = error.source();
        }
        None
    }

    /// What an error of the file system is, where it has a kind of its own.
    #[must_use]
    pub(crate) fn of_io(error: &io::Error) -> Option<Self> {
        use io::ErrorKind as E;
        match error.kind() {
            E::StorageFull | E::QuotaExceeded => Some(Self::DiskFull),
            E::ReadOnlyFilesystem => Some(Self::DiskReadOnly),
            _ if error.get_ref().is_some_and(|inner| inner.is::<NoThread>()) => Some(Self::Processes),
            // What the library has no kind for. Where a path was added the number stands in the text only.
            _ => match Errno::from_io_error(error).or_else(|| numbered(&error.to_string())) {
                Some(Errno::MFILE | Errno::NFILE) => Some(Self::OpenFiles),
                // A file's size: the limit of this process (`RLIMIT_FSIZE`), or of the file system.
                Some(Errno::FBIG) => Some(Self::DiskFull),
                _ => None,
            },
        }
    }

    /// What keeps the system from starting or reading something, by its word, where that has a kind of its own.
    #[must_use]
    pub(crate) fn of_start(said: &str) -> Option<Self> {
        match numbered(said) {
            Some(Errno::MFILE | Errno::NFILE) => Some(Self::OpenFiles),
            // Of `fork`.
            Some(Errno::AGAIN) => Some(Self::Processes),
            // Of the files that it is given.
            Some(Errno::NOSPC | Errno::DQUOT | Errno::FBIG) => Some(Self::DiskFull),
            Some(Errno::ROFS) => Some(Self::DiskReadOnly),
            _ => None,
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
