//! The variables that only `vm` reads; docs/CONFIG.md shows them. All others are the agent's and those of its rules.

/// Name, default, meaning.
pub(crate) const VARIABLES: &[(&str, &str, &str)] = &[
    (
        "ISTIO_SIDECAR_CONFIG",
        "./var/lib/istio/envoy/sidecar.env",
        "the operator's file; --sidecar-env goes before",
    ),
    (
        "ISTIO_CLUSTER_CONFIG",
        "./var/lib/istio/envoy/cluster.env",
        "the file of istioctl, laid over the operator's; --cluster-env goes before",
    ),
    ("ISTIO_NAMESPACE", "default", "namespace of the workload; becomes POD_NAMESPACE"),
    ("ISTIO_SERVICE", "rawvm", "serviceCluster, where PROXY_CONFIG is not set"),
    (
        "ISTIO_SVC_IP",
        "",
        "the workload's IP address, INSTANCE_IP; empty: this machine's first that others can reach",
    ),
    ("ISTIO_SYSTEM_NAMESPACE", "istio-system", "istiod's namespace, for its name"),
    ("PILOT_ADDRESS", "", "istiod, host:port, in place of discoveryAddress; also CA_ADDR's default"),
    ("ISTIO_PILOT_PORT", "", "istiod's port, where PILOT_ADDRESS is not set"),
    (
        "ISTIO_CP_AUTH",
        "MUTUAL_TLS",
        "controlPlaneAuthPolicy, where PROXY_CONFIG is not set; NONE counts only for a port of plain text",
    ),
    ("ISTIO_AGENT_FLAGS", "", "more flags of proxy, separated by blanks"),
    (
        "EXEC_USER",
        "istio-proxy",
        "whom the agent runs as, a name or number of /etc/passwd; root with TPROXY. docs/INSTALL.md has what else this takes",
    ),
    (
        "ISTIO_LOG_DIR",
        "./var/log/istio",
        "folder of istio.log and istio.err.log; set but empty: standard output and errors",
    ),
    ("ISTIO_CUSTOM_IP_TABLES", "", "true: somebody else makes the rules"),
    ("ISTIO_INBOUND_EXCLUDE_PORTS", "", "old name of ISTIO_LOCAL_EXCLUDE_PORTS, read where that is not set"),
];
