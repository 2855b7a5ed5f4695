//! The disk fault: a volume's file system fills up.

use kube::KubeSchema;
use serde::{Deserialize, Serialize};

use crate::units::{ByteSize, Percent};

/// Space on the file system of one of a container's volumes is taken.
#[derive(KubeSchema, Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.size) != has(self.percent)")
    .message("give either size or percent"))]
pub struct DiskFill {
    /// The volume: the path that it is mounted at in the container, as in its volumeMounts.
    #[schemars(length(min = 2, max = 1024), regex(pattern = r"^(/[^/\x00]+)+$"))]
    pub volume: String,

    /// How much is taken: 500Mi, 10Gi. More than there is to take is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<ByteSize>,

    /// How full the file system is made, what is in use already included: above 0, to 100. At 100 not
    /// even what it keeps for root is left.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new("double(self) > 0.0").message("must be more than 0"))]
    pub percent: Option<Percent>,
}
