//! Lists in JSON that others write, read to a bound: a list of empty values needs much more memory than text.

use std::fmt;
use std::marker::PhantomData;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, SeqAccess, Visitor};

/// At most `N` of them; a longer list is an error when the next one comes.
#[derive(Debug)]
pub(crate) struct UpTo<T, const N: usize>(pub(crate) Vec<T>);

impl<T, const N: usize> Default for UpTo<T, N> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<'de, T: Deserialize<'de>, const N: usize> Deserialize<'de> for UpTo<T, N> {
    fn deserialize<D: Deserializer<'de>>(document: D) -> Result<Self, D::Error> {
        document.deserialize_seq(Taken(PhantomData))
    }
}

/// As Go reads it: `null` is what a field has that is not there.
pub(crate) fn null_is_none<'de, T, D>(document: D) -> Result<T, D::Error>
where
    T: Deserialize<'de> + Default,
    D: Deserializer<'de>,
{
    Ok(Option::deserialize(document)?.unwrap_or_default())
}

struct Taken<T, const N: usize>(PhantomData<T>);

impl<'de, T: Deserialize<'de>, const N: usize> Visitor<'de> for Taken<T, N> {
    type Value = UpTo<T, N>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a list of up to {N}")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Self::Value, A::Error> {
        let mut taken = Vec::new();
        while let Some(one) = list.next_element()? {
            if taken.len() == N {
                return Err(A::Error::custom(format_args!("more than {N} in a list")));
            }
            taken.push(one);
        }
        Ok(UpTo(taken))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_more_is_an_error() {
        let read =
            |text| serde_json::from_str::<UpTo<u8, 2>>(text).map(|list| list.0).map_err(|e| e.to_string());
        assert_eq!(read("[]"), Ok(vec![]));
        assert_eq!(read("[1, 2]"), Ok(vec![1, 2]));
        assert!(read("[1, 2, 3]").unwrap_err().starts_with("more than 2 in a list"));
        assert!(read("{}").unwrap_err().contains("a list of up to 2"));
    }
}
