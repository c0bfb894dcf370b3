//! The resources of one type, by name.

use std::collections::{BTreeMap, BTreeSet};

use super::blocks::{Blocks, Place};
use super::read;

/// Name and version of a resource that Envoy has.
type Had = (String, String);

/// What there is of one type.
#[derive(Debug, Clone, Default)]
pub(super) struct Set {
    pub(super) version: String,
    pub(super) names: BTreeMap<Box<str>, Place>,
    pub(super) blocks: Blocks,
}

impl Set {
    /// Keeps a resource under its name, in the place of one that had it.
    ///
    /// # Errors
    /// When it has 4 GB, or what is gathered cannot be compressed.
    pub(super) fn put(&mut self, name: &str, body: &[u8]) -> std::io::Result<()> {
        let place = self.blocks.put(body)?;
        if let Some(old) = self.names.insert(name.into(), place) {
            self.blocks.free(old);
        }
        Ok(())
    }

    /// Nobody has it any more.
    pub(super) fn remove(&mut self, name: &str) {
        if let Some(old) = self.names.remove(name) {
            self.blocks.free(old);
        }
    }

    /// Which of these delta resources are not here in this version. One block is unpacked at a time; what cannot be read is not
    /// here.
    pub(super) fn lacks<'a>(&self, has: impl Iterator<Item = &'a Had>) -> BTreeSet<String> {
        let mut lacks = BTreeSet::new();
        let mut here: BTreeMap<u32, Vec<(Place, &Had)>> = BTreeMap::new();
        for had in has {
            match self.names.get(had.0.as_str()) {
                Some(place) => here.entry(place.block()).or_default().push((*place, had)),
                None => {
                    lacks.insert(had.0.clone());
                }
            }
        }
        for all in here.into_values() {
            let places: Vec<Place> = all.iter().map(|(place, _)| *place).collect();
            let mut bodies = self.blocks.read(&places).unwrap_or_default().into_iter();
            for (_, (name, version)) in all {
                let kept = bodies.next().and_then(|body| read::version(&body).ok());
                if kept.as_ref() != Some(version) {
                    lacks.insert(name.clone());
                }
            }
        }
        lacks
    }

    /// Removes those that are not to be kept.
    pub(super) fn retain(&mut self, keep: impl Fn(&str) -> bool) {
        let Self { names, blocks, .. } = self;
        names.retain(|name, place| {
            let keep = keep(name);
            if !keep {
                blocks.free(*place);
            }
            keep
        });
    }

    /// At the end of a response: what it brought is compressed, and so is all of it anew where much is not needed any more.
    ///
    /// # Errors
    /// When a block is damaged, or cannot be compressed.
    pub(super) fn settle(&mut self) -> std::io::Result<()> {
        self.blocks.settle()?;
        if !self.blocks.is_wasteful() {
            return Ok(());
        }
        let places: Vec<Place> = self.names.values().copied().collect();
        let all = self.blocks.read(&places)?;
        self.blocks = Blocks::default();
        for (place, body) in self.names.values_mut().zip(all) {
            *place = self.blocks.put(&body)?;
        }
        self.blocks.settle()
    }
}
