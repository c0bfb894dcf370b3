//! The protocol files behind the served services, as descriptors. Pure.

use std::collections::BTreeSet;

/// A protocol file.
pub(super) struct File {
    name: &'static str,
    // Places of its imports among the files.
    imports: &'static [usize],
    // The full names that it defines.
    symbols: &'static [&'static str],
    descriptor: &'static [u8],
}

// Made by the build script from `proto/reflection`: about 8 KB.
static FILES: &[File] = include!(concat!(env!("OUT_DIR"), "/reflection.rs"));

/// The files that one stream has been given: clients keep them, so each is sent once.
#[derive(Debug, Default)]
pub(super) struct Sent(BTreeSet<usize>);

impl Sent {
    /// The file of a name with everything it imports, without what has been sent; the file itself always.
    pub(super) fn named(&mut self, name: &str) -> Option<Vec<&'static [u8]>> {
        FILES.iter().position(|f| f.name == name).map(|at| self.with_imports(at))
    }

    /// As [`Sent::named`], for the file that defines a symbol.
    pub(super) fn defining(&mut self, symbol: &str) -> Option<Vec<&'static [u8]>> {
        FILES.iter().position(|f| f.symbols.contains(&symbol)).map(|at| self.with_imports(at))
    }

    fn with_imports(&mut self, at: usize) -> Vec<&'static [u8]> {
        self.0.insert(at);
        let mut found = vec![at];
        let mut next = 0;
        while let Some(&file) = found.get(next) {
            next += 1;
            found.extend(FILES[file].imports.iter().filter(|import| self.0.insert(**import)));
        }
        found.into_iter().map(|file| FILES[file].descriptor).collect()
    }
}

/// Whether a name is that of a message (or of anything else that is defined here).
pub(super) fn known(symbol: &str) -> bool {
    FILES.iter().any(|f| f.symbols.contains(&symbol))
}

#[cfg(test)]
mod tests {
    use prost::Message;
    use prost_types::FileDescriptorProto;

    use super::*;

    #[test]
    fn every_file_decodes_and_its_imports_are_there() {
        for file in FILES {
            let read = FileDescriptorProto::decode(file.descriptor).unwrap();
            assert_eq!(read.name(), file.name);
            let imports: Vec<_> = file.imports.iter().map(|i| FILES[*i].name).collect();
            assert_eq!(read.dependency, imports);
        }
        assert!(FILES.iter().map(|f| f.descriptor.len()).sum::<usize>() < 16 * 1024);
    }

    #[test]
    fn a_stream_is_given_each_file_once() {
        let mut sent = Sent::default();
        let first = sent.defining("envoy.service.discovery.v3.AggregatedDiscoveryService").unwrap();
        assert!(first.len() > 5);
        let again = sent.named("envoy/service/discovery/v3/ads.proto").unwrap();
        assert_eq!(again, first[..1], "what was asked for, without its imports");
        assert_eq!(sent.defining("google.rpc.Status").unwrap().len(), 1);
        assert!(sent.defining("no.such.Thing").is_none() && sent.named("no.proto").is_none());
    }
}
