//! What the API server sends: lists and events, of which little is kept. Pure.

use std::collections::BTreeMap;
use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, MapAccess, Visitor};
use zeroize::{Zeroize, Zeroizing};

use super::read::FIELDS;
use crate::base::up_to::UpTo;

/// Secrets in a list, which names one.
const ITEMS: usize = 16;
/// Fields of a secret.
const MANY: usize = 1024;

#[derive(Deserialize, Default)]
#[serde(default, rename_all = "camelCase")]
pub(super) struct Meta {
    pub(super) name: String,
    pub(super) resource_version: String,
}

/// The fields of a secret that are read, in base64; wiped when dropped.
#[derive(Default)]
struct Data(BTreeMap<String, String>);

impl Drop for Data {
    fn drop(&mut self) {
        self.0.values_mut().for_each(Zeroize::zeroize);
    }
}

impl<'de> Deserialize<'de> for Data {
    fn deserialize<D: Deserializer<'de>>(document: D) -> Result<Self, D::Error> {
        document.deserialize_map(Known)
    }
}

/// Keeps what [`FIELDS`] names; some others may stand beside it.
struct Known;

impl<'de> Visitor<'de> for Known {
    type Value = Data;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the fields of a secret")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Data, A::Error> {
        let (mut data, mut seen) = (Data::default(), 0);
        while let Some(name) = fields.next_key::<String>()? {
            seen += 1;
            if seen > MANY {
                return Err(A::Error::custom(format_args!("more than {MANY} fields")));
            }
            if FIELDS.contains(&name.as_str()) {
                if let Some(mut old) = data.0.insert(name, fields.next_value()?) {
                    old.zeroize();
                }
            } else {
                fields.next_value::<IgnoredAny>()?;
            }
        }
        Ok(data)
    }
}

/// A secret as the API has it.
#[derive(Deserialize, Default)]
#[serde(default)]
pub(super) struct Object {
    pub(super) metadata: Meta,
    data: Option<Data>,
    /// Of a `Status` in an event of type ERROR.
    pub(super) code: u16,
}

impl Object {
    /// A field, decoded.
    pub(super) fn field(&self, name: &str) -> Option<Zeroizing<Vec<u8>>> {
        STANDARD.decode(self.data.as_ref()?.0.get(name)?).ok().map(Zeroizing::new)
    }
}

/// Of one name there is one secret at most.
#[derive(Deserialize)]
pub(super) struct List {
    #[serde(default)]
    pub(super) metadata: Meta,
    /// A list of nothing is null for some servers.
    pub(super) items: Option<UpTo<Object, ITEMS>>,
}

/// One line of a watch.
#[derive(Deserialize)]
pub(super) struct Event {
    pub(super) r#type: String,
    #[serde(default)]
    pub(super) object: Object,
}

/// A list and an event, from what the API server sent, and the fields in them.
#[cfg(debug_assertions)]
pub(super) fn fuzz(bytes: &[u8], mut seen: impl FnMut(&Object)) {
    if let Ok(list) = serde_json::from_slice::<List>(bytes) {
        list.items.iter().flat_map(|items| &items.0).for_each(&mut seen);
    }
    if let Ok(event) = serde_json::from_slice::<Event>(bytes) {
        seen(&event.object);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_nothing_may_be_null() {
        let list = br#"{"metadata": {"resourceVersion": "7"}, "items": null}"#;
        let list: List = serde_json::from_slice(list).unwrap();
        assert!(list.items.is_none() && list.metadata.resource_version == "7");
    }

    #[test]
    fn of_fields_and_items_as_many_are_kept_as_a_secret_has() {
        let fields = (0..1000).map(|n| format!(r#""f{n}":"","#)).collect::<String>();
        let secret = format!(r#"{{"metadata":{{"name":"a"}},"data":{{{fields}"tls.key":"YQ=="}}}}"#);
        let list = |items: String| serde_json::from_str::<List>(&format!(r#"{{"items":[{items}]}}"#));
        let kept = list(secret).unwrap().items.unwrap().0;
        assert_eq!(kept[0].field("tls.key").unwrap().as_slice(), b"a");
        assert_eq!(kept[0].data.as_ref().unwrap().0.len(), 1);
        let many = (0..=MANY).map(|n| format!(r#""f{n}":"""#)).collect::<Vec<_>>().join(",");
        assert!(list(format!(r#"{{"data":{{{many}}}}}"#)).is_err());
        assert!(list(vec!["{}"; ITEMS].join(",")).is_ok());
        assert!(list(vec!["{}"; ITEMS + 1].join(",")).is_err());
    }
}
