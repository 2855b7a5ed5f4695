//! Faults that use up what a container may use.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::units::{Cores, Percent};

/// CPU time is burnt inside the container's own control group, against its own limit: the
/// container and the burner share what the container may use, and nobody else is starved.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CpuFault {
    /// How much CPU time is burnt: a percentage of `cores`, above 0, to 100. It is what the burner
    /// itself uses, kept by measuring it; where the container is busy too, both get less.
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub load: Percent,

    /// The number of cores that `load` is a percentage of: 500m, 2. Default: the container's CPU
    /// limit; a container without a limit is refused unless this is set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cores: Option<Cores>,
}
