//! `process_*`: what the kernel knows of this process.
//!
//! Why not the collector of the `prometheus` crate: it brings `procfs` and misses the two network
//! counters of the Go agent's.

use std::collections::HashMap;

use prometheus::core::{Collector, Desc};
use prometheus::proto::{Counter, Gauge, Metric, MetricFamily, MetricType};

#[derive(Debug)]
pub(super) struct Process {
    descs: Vec<Desc>,
}

const FAMILIES: &[(&str, &str, bool)] = &[
    ("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.", true),
    ("process_max_fds", "Maximum number of open file descriptors.", false),
    (
        "process_network_receive_bytes_total",
        "Number of bytes received by the process over the network.",
        true,
    ),
    ("process_network_transmit_bytes_total", "Number of bytes sent by the process over the network.", true),
    ("process_open_fds", "Number of open file descriptors.", false),
    ("process_resident_memory_bytes", "Resident memory size in bytes.", false),
    ("process_start_time_seconds", "Start time of the process since unix epoch in seconds.", false),
    ("process_virtual_memory_bytes", "Virtual memory size in bytes.", false),
    ("process_virtual_memory_max_bytes", "Maximum amount of virtual memory available in bytes.", false),
];

/// USER_HZ: what the kernel counts `/proc` times in; 100 on every architecture Linux offers to users.
const TICKS: f64 = 100.0;

impl Process {
    pub(super) fn new() -> Self {
        let desc =
            |name: &str, help: &str| Desc::new(name.to_owned(), help.to_owned(), Vec::new(), HashMap::new());
        let descs = FAMILIES.iter().filter_map(|(name, help, _)| desc(name, help).ok()).collect();
        Self { descs }
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        self.descs.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let stat = read("/proc/self/stat");
        // The command's name may hold anything; the fields follow its closing bracket. Numbers in proc(5)
        // count from 1 and the first one here is the third.
        let fields: Vec<&str> =
            stat.rsplit_once(')').map_or("", |(_, rest)| rest).split_whitespace().collect();
        let field = |number: usize| fields.get(number - 3).and_then(|f| f.parse::<f64>().ok());
        let status = read("/proc/self/status");
        let kilobytes = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<f64>().ok().map(|kb| kb * 1024.0)
        };
        let limits = read("/proc/self/limits");
        let limit = |name: &str| {
            let soft = limits.lines().find_map(|line| line.strip_prefix(name))?.split_whitespace().next()?;
            if soft == "unlimited" { Some(18_446_744_073_709_551_615.0) } else { soft.parse().ok() }
        };
        let booted =
            read("/proc/stat").lines().find_map(|l| l.strip_prefix("btime ")?.trim().parse::<f64>().ok());
        let net = network(&read("/proc/self/net/netstat"));
        // The folder itself is open while it is read.
        let open = std::fs::read_dir("/proc/self/fd").ok().map(|dir| dir.count().saturating_sub(1) as f64);
        let values = [
            field(14).zip(field(15)).map(|(user, system)| (user + system) / TICKS),
            limit("Max open files"),
            net.0,
            net.1,
            open,
            kilobytes("VmRSS:"),
            booted.zip(field(22)).map(|(boot, start)| boot + start / TICKS),
            field(23),
            limit("Max address space"),
        ];
        FAMILIES.iter().zip(values).filter_map(|(family, value)| Some(sample(family, value?))).collect()
    }
}

/// Bytes in and out of the network namespace (`InOctets`, `OutOctets`).
fn network(netstat: &str) -> (Option<f64>, Option<f64>) {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("IpExt:"));
    let (Some(names), Some(values)) = (lines.next(), lines.next()) else { return (None, None) };
    let of = |wanted: &str| {
        let at = names.split_whitespace().position(|name| name == wanted)?;
        values.split_whitespace().nth(at)?.parse().ok()
    };
    (of("InOctets"), of("OutOctets"))
}

fn sample(&(name, help, counter): &(&str, &str, bool), value: f64) -> MetricFamily {
    let mut metric = Metric::default();
    if counter {
        let mut c = Counter::default();
        c.set_value(value);
        metric.set_counter(c);
    } else {
        let mut g = Gauge::default();
        g.set_value(value);
        metric.set_gauge(g);
    }
    let mut family = MetricFamily::default();
    family.set_name(name.to_owned());
    family.set_help(help.to_owned());
    family.set_field_type(if counter { MetricType::COUNTER } else { MetricType::GAUGE });
    family.set_metric(vec![metric]);
    family
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_families_have_a_value_here() {
        let families = Process::new().collect();
        let names: Vec<_> = families.iter().map(|f| f.name().to_owned()).collect();
        assert_eq!(names, FAMILIES.iter().map(|f| f.0).collect::<Vec<_>>());
        assert!(families.iter().any(|f| f.name() == "process_resident_memory_bytes"
            && f.get_metric()[0].get_gauge().get_value() > 1e6));
    }

    #[test]
    fn network_counters_are_found_by_name() {
        assert_eq!(network("IpExt: InNoRoutes InOctets OutOctets\nIpExt: 0 7 9\n"), (Some(7.0), Some(9.0)));
        assert_eq!(network(""), (None, None));
    }
}
