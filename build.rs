//! Compiles `proto/` to Rust without a `protoc` on the machine (protox parses the files itself).

// A build script is told everything by variables; the rule is for the product.
#![allow(clippy::disallowed_methods)]

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt::Write;
use std::path::PathBuf;

use prost::Message;
use prost_types::field_descriptor_proto::{Label, Type};
use prost_types::{DescriptorProto, EnumDescriptorProto, FieldDescriptorProto};

fn main() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=proto");
    build_info()?;
    let services = protox::compile(["proto/ca.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(false).compile_fds(services)?;
    mesh()?;
    schema()?;
    reflection()?;
    order_functions()
}

// For `version`: the target, and the crypto library's versions as the lock file pins them.
fn build_info() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=Cargo.lock");
    let lock =
        std::fs::read_to_string(PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join("Cargo.lock"));
    let lock = lock.unwrap_or_default();
    for name in ["aws-lc-rs", "aws-lc-sys", "aws-lc-fips-sys"] {
        let entry = lock.split(&format!("name = \"{name}\"\nversion = \"")).nth(1);
        let version = entry.and_then(|rest| rest.split('"').next()).unwrap_or("of unknown version");
        println!("cargo:rustc-env=PILOT_AGENT_{}={version}", name.to_uppercase().replace('-', "_"));
    }
    println!("cargo:rustc-env=PILOT_AGENT_TARGET={}", std::env::var("TARGET")?);
    Ok(())
}

// What server reflection tells about the services of the ADS socket: each file's descriptor as clients
// take it, its imports, and the names it defines.
fn reflection() -> Result<(), Box<dyn Error>> {
    let files = ["service/discovery/v3/ads.proto"].map(|f| format!("envoy/{f}"));
    let own = ["v1", "v1alpha"].map(|v| format!("grpc/reflection/{v}/reflection.proto"));
    let set = protox::compile(files.iter().chain(&own), ["proto/reflection"])?;
    let names: Vec<String> = set.file.iter().map(|f| f.name().to_owned()).collect();
    let mut text = String::new();
    for mut file in set.file {
        file.source_code_info = None;
        let position = |import: &String| names.iter().position(|n| n == import).ok_or("an import is missing");
        let imports = file.dependency.iter().map(position).collect::<Result<Vec<_>, _>>()?;
        let mut symbols = Vec::new();
        for message in &file.message_type {
            defined(file.package(), message, &mut symbols);
        }
        for service in &file.service {
            let name = format!("{}.{}", file.package(), service.name());
            symbols.extend(service.method.iter().map(|m| format!("{name}.{}", m.name())));
            symbols.push(name);
        }
        writeln!(
            text,
            "File {{ name: {:?}, imports: &{imports:?}, symbols: &{symbols:?}, descriptor: b\"{}\" }},",
            file.name(),
            file.encode_to_vec().escape_ascii()
        )?;
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    Ok(std::fs::write(out.join("reflection.rs"), format!("&[{text}]"))?)
}

fn defined(scope: &str, message: &DescriptorProto, symbols: &mut Vec<String>) {
    let name = format!("{scope}.{}", message.name());
    symbols.extend(message.field.iter().map(|f| format!("{name}.{}", f.name())));
    for nested in &message.nested_type {
        defined(&name, nested, symbols);
    }
    symbols.push(name);
}

// Only where a binary is linked for use: tests need no order, and their binaries other functions. The lists are
// made per target by scripts/link-order; one without a list is linked in the compiler's order, which costs resident
// memory and nothing else. LINK_ORDER=off leaves the order out everywhere (a linker that knows no scripts, a doubt).
fn order_functions() -> Result<(), Box<dyn Error>> {
    println!("cargo:rerun-if-changed=link");
    println!("cargo:rerun-if-env-changed=LINK_ORDER");
    let of = |part: &str| std::env::var(format!("CARGO_CFG_TARGET_{part}"));
    let system = of("OS")?;
    if system != "linux" {
        return Err(format!("pilot-agent runs on Linux only: it cannot be built for {system}").into());
    }
    let off = match std::env::var("LINK_ORDER").as_deref() {
        Ok("off") => true,
        Err(_) | Ok("" | "on") => false,
        Ok(other) => return Err(format!("LINK_ORDER={other}: it is on or off").into()),
    };
    let name = format!("link/{}-linux-{}.ld", of("ARCH")?, of("ENV")?);
    let script = PathBuf::from(std::env::var("CARGO_MANIFEST_DIR")?).join(name);
    if std::env::var("PROFILE")? == "release" && !off && script.is_file() {
        println!("cargo:rustc-link-arg-bins=-Wl,-T,{}", script.display());
    }
    Ok(())
}

// Types with their JSON mapping; maps are sorted, as the Go agent prints them.
fn mesh() -> Result<(), Box<dyn Error>> {
    let set = protox::compile(["proto/mesh/proxy.proto"], ["proto"])?;
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    pbjson_build::Builder::new()
        .register_descriptors(&set.encode_to_vec())?
        .ignore_unknown_fields()
        .btree_map(["."])
        .out_dir(&out)
        .build(&[".istio.mesh", ".istio.networking"])?;
    tonic_prost_build::configure()
        .build_client(false)
        .build_server(false)
        .compile_well_known_types(true)
        .extern_path(".google.protobuf", "::pbjson_types")
        .btree_map(".")
        .out_dir(&out)
        .compile_fds(set)?;
    Ok(())
}

// What a MeshConfig may hold, as tables for the lenient reader of `config::jsonpb`: a few kilobytes of
// constants, where generated code for a message that nobody reads would be a hundred.
fn schema() -> Result<(), Box<dyn Error>> {
    let set = protox::compile(["proto/mesh/config.proto"], ["proto"])?;
    let mut all = Types::default();
    for file in &set.file {
        for message in &file.message_type {
            all.message(&format!(".{}", file.package()), message);
        }
        for item in &file.enum_type {
            all.enums.insert(format!(".{}.{}", file.package(), item.name()), item.clone());
        }
    }
    let mut text = String::new();
    for (name, message) in &all.messages {
        let entry = message.options.as_ref().is_some_and(|o| o.map_entry());
        if name.starts_with(".google.") || entry {
            continue;
        }
        writeln!(
            text,
            "pub static {}: Message = Message {{ name: {:?}, fields: &[",
            ident(name),
            &name[1..]
        )?;
        for field in &message.field {
            let (shape, kind) = all.kind(field)?;
            let oneof = field.oneof_index.map_or(-1, |i| i);
            writeln!(
                text,
                "Field {{ json: {:?}, name: {:?}, shape: Shape::{shape}, kind: {kind}, oneof: {oneof} }},",
                field.json_name(),
                field.name()
            )?;
        }
        text.push_str("] };\n");
    }
    for (name, item) in &all.enums {
        writeln!(text, "pub static {}: Enum = Enum {{ name: {:?}, values: &[", ident(name), &name[1..])?;
        for value in &item.value {
            writeln!(text, "({:?}, {}),", value.name(), value.number())?;
        }
        text.push_str("] };\n");
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").ok_or("OUT_DIR is not set")?);
    Ok(std::fs::write(out.join("schema.rs"), text)?)
}

#[derive(Default)]
struct Types {
    messages: BTreeMap<String, DescriptorProto>,
    enums: BTreeMap<String, EnumDescriptorProto>,
}

impl Types {
    fn message(&mut self, scope: &str, message: &DescriptorProto) {
        let name = format!("{scope}.{}", message.name());
        for nested in &message.nested_type {
            self.message(&name, nested);
        }
        for item in &message.enum_type {
            self.enums.insert(format!("{name}.{}", item.name()), item.clone());
        }
        self.messages.insert(name, message.clone());
    }

    fn kind(&self, field: &FieldDescriptorProto) -> Result<(&'static str, String), Box<dyn Error>> {
        let entry = self.messages.get(field.type_name());
        if let Some(entry) = entry.filter(|m| m.options.as_ref().is_some_and(|o| o.map_entry())) {
            let (_, value) = self.kind(&entry.field[1])?;
            return Ok(("Map", value));
        }
        let shape = if field.label() == Label::Repeated { "List" } else { "One" };
        let kind = match field.r#type() {
            Type::String => "Kind::Text".to_owned(),
            Type::Bool => "Kind::Bool".to_owned(),
            Type::Int32 => "Kind::Int32".to_owned(),
            Type::Uint32 => "Kind::Uint32".to_owned(),
            Type::Double => "Kind::Double".to_owned(),
            Type::Enum => format!("Kind::Enum(&{})", ident(field.type_name())),
            Type::Message => match field.type_name() {
                ".google.protobuf.Duration" => "Kind::Duration".to_owned(),
                ".google.protobuf.Struct" => "Kind::Struct".to_owned(),
                ".google.protobuf.BoolValue" => "Kind::Wrapped(&Kind::Bool)".to_owned(),
                ".google.protobuf.Int32Value" => "Kind::Wrapped(&Kind::Int32)".to_owned(),
                ".google.protobuf.Int64Value" => "Kind::Wrapped(&Kind::Int64)".to_owned(),
                ".google.protobuf.UInt32Value" => "Kind::Wrapped(&Kind::Uint32)".to_owned(),
                name => format!("Kind::Message(&{})", ident(name)),
            },
            other => return Err(format!("{}: {other:?} has no reader", field.name()).into()),
        };
        Ok((shape, kind))
    }
}

fn ident(name: &str) -> String {
    name.trim_start_matches('.').replace('.', "_").to_uppercase()
}
