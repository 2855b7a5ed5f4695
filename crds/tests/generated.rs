//! The committed YAML of the custom resources, in both places, says what the types say.

use std::{fs, path::Path};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use windtunnel_crds::{definitions, names::GROUP};

#[test]
fn generated_definitions_are_fresh() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    for folder in ["generated", "../charts/windtunnel/crds"] {
        for crd in definitions() {
            let file = root
                .join(folder)
                .join(format!("{}.{GROUP}.yaml", crd.spec.names.plural));
            let text = fs::read_to_string(&file).unwrap();
            let committed: CustomResourceDefinition = serde_saphyr::from_str(&text).unwrap();
            assert!(
                serde_json::to_value(&committed).unwrap() == serde_json::to_value(&crd).unwrap(),
                "{} is stale: run `cargo lab generate`",
                file.display()
            );
        }
    }
}
