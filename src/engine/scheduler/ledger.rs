//! Counts the tokens that were served to each tenant.

use std::collections::BTreeMap;
use std::ops::Range;

use super::order::{Seniority, Turn};

/// Identifies the owner of a sequence, such as a client with its own API key.
pub type TenantId = u64;

/// The weight of a generated token, as in the paper that `fair_queue.rs` names. A prompt token has weight 1.
const GENERATED_WEIGHT: u64 = 2;

/// The number of sequences of each tenant, and the number of tokens served to it.
#[derive(Default)]
pub struct TenantLedger {
    accounts: BTreeMap<TenantId, Account>,
}

/// The sequences of one tenant, and the tokens served to it.
#[derive(Default)]
struct Account {
    /// The weighted number of served tokens. `FairQueue` adjusts it when a sequence starts to wait, so that the numbers
    /// of all tenants are comparable.
    served: u64,
    /// The number of the tenant's sequences that have not ended, waiting or not.
    sequences: usize,
}

impl TenantLedger {
    /// Counts new sequences of a tenant.
    pub fn join(&mut self, tenant: TenantId, sequences: usize) {
        self.accounts.entry(tenant).or_default().sequences += sequences;
    }

    /// Counts a sequence of a tenant as ended. The sequence must not be waiting.
    pub fn leave(&mut self, tenant: TenantId) {
        if let Some(account) = self.accounts.get_mut(&tenant) {
            account.sequences -= 1;
        }
    }

    /// Adds the tokens at the positions in `range` to the tenant's served tokens. The prompt ends at `prompt`.
    pub fn serve(&mut self, tenant: TenantId, range: Range<usize>, prompt: usize) {
        let generated = range.end.saturating_sub(range.start.max(prompt)) as u64;
        let tokens = range.len() as u64 + (GENERATED_WEIGHT - 1) * generated;
        if let Some(account) = self.accounts.get_mut(&tenant) {
            account.served = account.served.saturating_add(tokens);
        }
    }

    /// Returns the weighted number of tokens served to a tenant.
    pub fn served(&self, tenant: TenantId) -> u64 {
        self.accounts.get(&tenant).map_or(0, |account| account.served)
    }

    pub fn set_served(&mut self, tenant: TenantId, served: u64) {
        self.accounts.entry(tenant).or_default().served = served;
    }

    /// Sets the served tokens of all tenants to 0.
    pub fn reset(&mut self) {
        self.accounts.values_mut().for_each(|account| account.served = 0);
    }

    /// Forgets the tenants without sequences that were served at most `served` tokens.
    pub fn forget(&mut self, served: u64) {
        self.accounts.retain(|_, account| account.sequences > 0 || account.served > served);
    }

    /// Returns the turn of a sequence, which depends on the tokens served to its tenant so far.
    pub fn turn(&self, tenant: TenantId, seniority: Seniority) -> Turn {
        Turn::new(self.served(tenant), seniority)
    }

    /// Returns whether all sequences belong to the same tenant. If so, the order of turns is the order of seniority.
    pub fn has_one_tenant(&self) -> bool {
        self.accounts.values().filter(|account| account.sequences > 0).nth(1).is_none()
    }

    /// Returns the number of tenants that are not forgotten.
    #[cfg(test)]
    pub fn tenants(&self) -> usize {
        self.accounts.len()
    }
}
