//! The library's codec with small buffers.
//!
//! By default each stream holds two of 8 KB for as long as it is open, which is nearly all that it costs. What
//! passes is small: a first request of some kilobytes (it brings the node), names and nonces after that, and a
//! chain with its key now and then. Buffers grow by what a message needs.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{BufferSettings, Codec, EncodeBuf, Encoder};
use tonic_prost::ProstCodec;

/// What the buffer of requests has at first, and grows by, in bytes.
const BUFFER: usize = 512;
/// Answers that are ready are sent together up to this size; the library's figure.
const TOGETHER: usize = 32 * 1024;

/// Encodes `T`, decodes `U`.
pub(super) struct Small<T, U>(PhantomData<(T, U)>);

impl<T, U> Default for Small<T, U> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<T: Message + Send + 'static, U: Message + Default + Send + 'static> Codec for Small<T, U> {
    type Encode = T;
    type Decode = U;
    type Encoder = Exact<T>;
    type Decoder = <ProstCodec<T, U> as Codec>::Decoder;

    fn encoder(&mut self) -> Self::Encoder {
        Exact(PhantomData)
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstCodec::<T, U>::raw_decoder(BufferSettings::new(BUFFER, TOGETHER))
    }
}

/// Takes as much room as a message needs: a buffer that is grown by doubling stays as long as its stream, and one for
/// a chain with its key was half of what a stream costs.
pub(super) struct Exact<T>(PhantomData<T>);

impl<T: Message> Encoder for Exact<T> {
    type Item = T;
    type Error = Status;

    fn encode(&mut self, item: T, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.reserve(item.encoded_len());
        item.encode(to).map_err(|error| Status::internal(error.to_string()))
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(0, TOGETHER)
    }
}
